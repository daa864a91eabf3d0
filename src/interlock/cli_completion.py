"""``interlock completion SHELL``: the script that teaches a shell the verbs, options and choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final

import typer

from interlock.errors import Refusal
from interlock.option_kinds import Option

PROGRAM: Final = "interlock"
VARIABLE: Final = "_INTERLOCK_COMPLETE"
"""The script runs the program with this set, which then prints what fits; the CLI library's own protocol."""

SHELLS: Final = ("bash", "zsh", "fish")
BUILT_IN_MODELS: Final = ("demo", "tiny-random")


def completion(
    shell: Annotated[str, typer.Argument(metavar="|".join(SHELLS), help="Shell to print the script for.")],
) -> int:
    """Print the script that completes verbs, options and choices in a shell."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        alternatives = [f"{PROGRAM} completion {name}" for name in SHELLS]
        raise Refusal(option="SHELL", given=shell, rule="is not known", alternatives=alternatives)
    print(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell))
    return 0


def answers_shells(environ: Mapping[str, str]) -> bool:
    """Get the CLI library ready to answer a completion script; False where none asks."""
    if VARIABLE not in environ:
        return False
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
    return True


def values_of(option: Option) -> Callable[[str], list[str]] | None:
    """What completes an option's value; None leaves it to the shell (files)."""
    if option.name == "model":
        return _beginning(lambda: BUILT_IN_MODELS)
    return _beginning(option.allowed) if option.choices is not None else None


def _beginning(values: Callable[[], tuple[str, ...]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return complete
