"""The verbs ``verify`` and ``evidence``: command lines to calls, and results to exit codes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.console import console
from interlock.errors import InterlockError, Refusal

if TYPE_CHECKING:
    from interlock.plan.facts import MachineFacts
    from interlock.plan.launch_plan import LaunchPlan
    from interlock.verify.prompts import Prompt, Tokeniser
    from interlock.verify.run import Side

evidence_app = typer.Typer(
    help="Recorded runs that show combinations correct.", no_args_is_help=True, rich_markup_mode=None
)
Ledger = Annotated[
    list[Path] | None,
    typer.Option("--ledger", metavar="DIR", help="Folder; default: the installation's and yours."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="folder of a checkpoint, or a built-in name")],
    candidate: Annotated[
        str, typer.Option(metavar="OPTIONS", help="Options of the engine to prove, in one string.")
    ] = "",
    control: Annotated[
        str | None, typer.Option(metavar="OPTIONS", help="Options of the engine to compare with.")
    ] = None,
    control_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare with a running OpenAI-compatible server.")
    ] = None,
    control_model: Annotated[
        str | None, typer.Option(help="Model name there; default: the first that is served.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt a line, text or JSON; default: built in.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.html, report.json and evidence here.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Forced tokens after each prompt.", min=1)] = 16,
    alternatives: Annotated[
        int, typer.Option(help="Best tokens compared at each position.", min=0, max=100)
    ] = 5,
    tolerance: Annotated[
        float | None, typer.Option(help="Log-probabilities this near are rounding; default: by dtype.", min=0)
    ] = None,
    ranks_per_gpu: Annotated[
        int | None,
        typer.Option(help="Rehearsal: ranks that share a GPU, in both engines unless they say.", min=1),
    ] = None,
    record: Annotated[bool, typer.Option(help="Keep the evidence in your ledger.")] = True,
) -> int:
    """Compare two engines on the same text, token by token, and find the cause where they differ.

    Exit code: 0 equal or explained, 1 unexplained, 2 could not run.
    """
    if (control is None) == (control_url is None):
        raise Refusal(
            option="--control",
            given=control or "",
            rule="give either --control OPTIONS or --control-url URL",
            alternatives=('--control ""', "--control-url http://127.0.0.1:8000"),
        )
    try:
        return _verify(
            _Request(
                model, _sharing(candidate, ranks_per_gpu),
                None if control is None else _sharing(control, ranks_per_gpu),
                control_url, control_model, prompts, out, tokens, alternatives, tolerance, record,
            )
        )  # fmt: skip
    except InterlockError as error:
        print(f"interlock: could not run: {error}", file=sys.stderr)
        return 2


def _sharing(options: str, ranks_per_gpu: int | None) -> str:
    """``options`` of an engine with the rehearsal that was asked for, unless they set one."""
    if ranks_per_gpu is None or "--ranks-per-gpu" in options:
        return options
    return f"{options} --ranks-per-gpu {ranks_per_gpu}".strip()


@dataclass(frozen=True, slots=True)
class _Request:
    """The command line of ``verify``."""

    model: str
    candidate: str
    control: str | None
    control_url: str | None
    control_model: str | None
    prompts: Path | None
    out: Path | None
    tokens: int
    alternatives: int
    tolerance: float | None
    record: bool


def _verify(request: _Request) -> int:

    from interlock.evidence.ledger import write_evidence
    from interlock.launch import machine_facts
    from interlock.verify.html import page
    from interlock.verify.report import make_report, write_json
    from interlock.verify.run import Settings, verify
    from interlock.verify.terminal import render

    facts = machine_facts()
    candidate = _engine_side("candidate", request.model, request.candidate, facts)
    control, length = _control(request, facts)
    assert candidate.plan is not None, "the candidate is started here"
    tokeniser, notes = _tokeniser(candidate.plan)
    notes_to = console(stderr=True, highlight=False)
    result = verify(
        control,
        candidate,
        _prompts(request, (control, candidate), length, tokeniser),
        Settings(request.tokens, request.alternatives, request.tolerance),
        note=lambda text: notes_to.print(text, style="dim"),
    )
    report = make_report(result, facts, notes)
    console().print(render(report))
    if request.out is not None:
        request.out.mkdir(parents=True, exist_ok=True)
        write_json(report, request.out / "report.json")
        (request.out / "report.html").write_text(page(report), encoding="utf-8")
        write_evidence(report.evidence, request.out, name="evidence")
        print(f"report: {request.out / 'report.html'}", file=sys.stderr)
    if request.record:
        print(f"evidence: {write_evidence(report.evidence)}", file=sys.stderr)
    return result.verdict.exit_code


def _control(request: _Request, facts: MachineFacts) -> tuple[Side, int | None]:
    """The control and, of a running server, the longest text that it says it takes."""
    from interlock.verify.http_arm import HttpArm
    from interlock.verify.run import Side

    url = request.control_url
    if url is None:
        return _engine_side("control", request.model, request.control or "", facts), None

    def start() -> HttpArm:
        key = os.environ.get("INTERLOCK_API_KEY")
        return HttpArm(url, model=request.control_model, api_key=key)

    probe = start()
    probe.close()
    return Side("control", url, None, start), probe.max_length


def _engine_side(name: str, model: str, text: str, facts: MachineFacts) -> Side:
    from interlock.launch import plan_launch
    from interlock.option_text import options_of
    from interlock.verify.engine_arm import EngineArm
    from interlock.verify.run import Side

    plan = plan_launch(model, options_of(text, f"--{name}"), facts)
    return Side(name, text, plan, lambda: EngineArm(plan))


def _tokeniser(plan: LaunchPlan) -> tuple[Tokeniser, tuple[str, ...]]:
    """The model's tokenizer, or a stand-in with a note for a configuration without weights or tokenizer."""
    from interlock.demo.shapes import shape_folder
    from interlock.tokenizer import load_tokenizer
    from interlock.verify.prompts import DrawnTokens

    if shape_folder(plan.model) is not None:
        return DrawnTokens(plan.card.vocab_size), (DrawnTokens.NOTE,)
    return load_tokenizer(plan.model_path), ()


def _prompts(
    request: _Request, sides: tuple[Side, Side], length: int | None, tokeniser: Tokeniser
) -> list[Prompt]:
    from interlock.verify.prompts import built_in_prompts, prompts_of_file

    plans = [side.plan for side in sides if side.plan is not None]
    if request.prompts is not None:
        return prompts_of_file(request.prompts, tokeniser)
    return built_in_prompts(plans, tokeniser, request.tokens, length)


@evidence_app.command("list")
def list_(ledger: Ledger = None, json: Json = False) -> int:
    """Show what was proven and measured, and which files do not count."""
    from interlock.evidence.show import print_list

    return print_list(ledger, as_json=json)


@evidence_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A file, or the beginning of its name in a ledger.")],
    ledger: Ledger = None,
    json: Json = False,
) -> int:
    """Show one evidence file."""
    from interlock.evidence.show import print_one

    return print_one(name, ledger, as_json=json)


@evidence_app.command()
def check(
    files: Annotated[list[Path] | None, typer.Argument(help="Files; default: all of the ledgers.")] = None,
    ledger: Ledger = None,
) -> int:
    """Check that evidence is whole and does not contradict itself. Exit code 1 when some does."""
    from interlock.evidence.show import print_check

    return print_check(files, ledger)
