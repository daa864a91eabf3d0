"""Draw docs/images/plan.svg, the README's picture: a part of what ``interlock plan`` prints for its command.

python scripts/readme_picture.py
"""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
from rich.console import Console

from interlock.launch import plan_launch
from interlock.option_text import options_of
from interlock.plan.explain import explain

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "plan.svg"
OPTIONS = "--device cpu --tp-size 2 --moe-a2a-backend shared_memory"
GROUPS = ("Machine", "Ranks", "Experts")


def main() -> None:
    plan = plan_launch("demo", options_of(OPTIONS, "the picture"))
    plan = msgspec.structs.replace(plan, model_path="~/.cache/interlock/models/demo")
    console = Console(record=True, width=118, file=io.StringIO())
    console.print(explain(plan, GROUPS))
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(console.export_svg(title=f"interlock plan demo {OPTIONS}"), encoding="utf-8")


if __name__ == "__main__":
    main()
