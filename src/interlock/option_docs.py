"""``docs/options.md`` from the option table: ``python -m interlock.option_docs > docs/options.md``."""

from __future__ import annotations

from interlock.option_kinds import Kind, Option, Section
from interlock.option_sources import describe_default
from interlock.options import OPTIONS

HEADER = """\
# Options

Generated from `src/interlock/options.py` by `python -m interlock.option_docs > docs/options.md`; a test fails
when the two differ.

Each option is a flag of `interlock serve`, `plan` and `generate`, a key of a `--config` YAML file, an
environment variable and a keyword of `LLM(...)`. Flags win over the file, the file over the environment.
Unknown names are refused. `auto` lets a rule of the planner decide; `interlock plan MODEL` shows what it
decided, and why. A rule never changes what you set: what does not fit is refused, with flags that would work.
"""


def options_markdown() -> str:
    """The whole page."""
    return HEADER + "".join(_section(section) for section in Section)


def _section(section: Section) -> str:
    rows = [_row(option) for option in OPTIONS.values() if option.section is section]
    head = "| flag | environment | values | default | meaning | plan items |\n|---|---|---|---|---|---|\n"
    return f"\n## {section.value}\n{head}" + "".join(rows)


def _row(option: Option) -> str:
    flag = "`MODEL`" if option.name == "model" else f"`{option.flag}`"
    if option.kind is Kind.SWITCH:
        flag += f" / `--no-{option.flag[2:]}`"
    values = ", ".join(option.allowed()) or option.kind.value.replace("|", " or ")
    items = ", ".join(f"`{item}`" for item in option.items)
    return f"| {flag} | `{option.env}` | {values} | {describe_default(option)} | {option.help} | {items} |\n"


if __name__ == "__main__":
    print(options_markdown(), end="")
