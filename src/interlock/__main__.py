"""``python -m interlock``: the command ``interlock``, for launchers that start a module."""

from interlock.cli import main

if __name__ == "__main__":
    main()
