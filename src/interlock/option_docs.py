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

OTHER_NAMES = """
## Names in other engines
Flags of SGLang, vLLM and llama.cpp that mean the same or nearly so. They are refused, with the name here:
sizes and defaults differ, so nothing is taken over unseen.

| there | here |
|---|---|
"""


def options_markdown() -> str:
    """The whole page."""
    return HEADER + "".join(_section(section) for section in Section) + _other_names()


def _other_names() -> str:
    rows = [
        f"| {', '.join(f'`--{peer}`' for peer in option.peers)} | {_flag(option)} |\n"
        for option in OPTIONS.values()
        if option.peers
    ]
    return OTHER_NAMES + "".join(rows)


def _section(section: Section) -> str:
    rows = [_row(option) for option in OPTIONS.values() if option.section is section]
    head = "| flag | environment | values | default | meaning | plan items |\n|---|---|---|---|---|---|\n"
    return f"\n## {section.value}\n{head}" + "".join(rows)


def _row(option: Option) -> str:
    values = ", ".join(option.allowed()) or option.kind.value.replace("|", " or ")
    items = ", ".join(f"`{item}`" for item in option.items)
    default = describe_default(option)
    return f"| {_flag(option)} | `{option.env}` | {values} | {default} | {option.help} | {items} |\n"


def _flag(option: Option) -> str:
    if option.name == "model":
        return "`MODEL`"
    off = f" / `--no-{option.flag[2:]}`" if option.kind is Kind.SWITCH else ""
    return f"`{option.flag}`{off}"


if __name__ == "__main__":
    print(options_markdown(), end="")
