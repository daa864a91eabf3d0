"""Write docs/cases.md: which public report (docs/cases.yaml) is covered by which test.

A test claims a case by naming its id in the docstring of the test function or of its module's class.

  python scripts/list_cases.py            rewrite docs/cases.md
  python scripts/list_cases.py --check    exit 1 when the page is out of date
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "docs" / "cases.yaml"
PAGE = ROOT / "docs" / "cases.md"
CASE_ID = re.compile(r"\b([A-K]\d{2})\b")
GROUPS = {
    "A": "flags silently ignored, misconfiguration",
    "B": "dispatch and combine",
    "C": "routing numerics",
    "D": "fp8 blocks",
    "E": "attention",
    "F": "scheduler and KV cache",
    "G": "OpenAI API",
    "H": "prefill/decode disaggregation",
    "I": "CUDA graphs with a2a buffers",
    "J": "operations and weight loading",
    "K": "benchmark pitfalls",
}


def claims() -> dict[str, list[str]]:
    """Case id -> tests that name it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for case in dict.fromkeys(CASE_ID.findall(ast.get_docstring(node) or "")):
                    found[case].append(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return found


def page() -> str:
    cases: dict[str, dict[str, str]] = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    covered = claims()
    unknown = sorted(covered.keys() - cases.keys())
    if unknown:
        raise SystemExit(f"tests name cases that docs/cases.yaml does not have: {', '.join(unknown)}")
    count = sum(case in covered for case in cases)
    lines = [
        "# Public reports as cases",
        "",
        "Bugs that users of other engines reported in public, each turned into a test with the right value.",
        f"Written by `python scripts/list_cases.py`: {count} of {len(cases)} are covered.",
    ]
    for group, title in GROUPS.items():
        lines += ["", f"## {group}: {title}", "| case | what went wrong | covered by |", "|---|---|---|"]
        for case in sorted(case for case in cases if case[0] == group):
            tests = "<br>".join(f"`{test}`" for test in covered.get(case, [])) or "-"
            lines.append(f"| {case} | {cases[case]['title'].replace('|', '/')} | {tests} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    text = page()
    if parser.parse_args().check:
        sys.exit(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
