"""Draw docs/images/plan.svg, the README's picture: what ``interlock plan`` prints for the README's command.

python scripts/readme_picture.py
"""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
from rich.console import Console

from interlock.launch import plan_launch
from interlock.options import Options
from interlock.plan.explain import explain

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "plan.svg"


def main() -> None:
    plan = plan_launch("demo", Options.of(tp_size=2, moe_a2a_backend="shared_memory"))
    plan = msgspec.structs.replace(plan, model_path="~/.cache/interlock/models/demo")
    console = Console(record=True, width=118, file=io.StringIO())
    console.print(explain(plan))
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    title = "interlock plan demo --tp-size 2 --moe-a2a-backend shared_memory"
    PICTURE.write_text(console.export_svg(title=title), encoding="utf-8")


if __name__ == "__main__":
    main()
