"""``interlock bench``: measure, record, compare. Modules that need torch are imported inside the verbs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from interlock.cli_bench_run import begin, finish, integers, progress
from interlock.console import console
from interlock.errors import Refusal

bench_app = typer.Typer(
    help="Measure speed, record what was really run, and compare only what was matched.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Arms = Annotated[
    list[str] | None,
    typer.Option("--arm", metavar='NAME="OPTIONS"', help="Launch options of one arm; give it several times."),
]
RanksPerGpu = Annotated[
    int | None,
    typer.Option(help="Rehearsal: ranks that share a GPU, in arms that do not say; no speeds.", min=1),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, demo or tiny-random.")]
Rounds = Annotated[int, typer.Option(help="Times that every arm is measured, in turn.", min=1)]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the prompts; default: a new one, which is recorded.", min=0)
]
OneAtATime = Annotated[
    bool,
    typer.Option("--one-at-a-time", help="Restart the arms in every round, even if all fit in memory."),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for JSON and plots; default: your evidence folder.", file_okay=False),
]
Name = Annotated[str | None, typer.Option(help="File name without ending; default: made of what was run.")]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Also write PNG and SVG (needs matplotlib).")]


@bench_app.command()
def decode(
    model: Model,
    batch: Annotated[str, typer.Option(help="Global batches, with commas.")] = "1,2,4,8,16",
    arm: Arms = None,
    context: Annotated[int, typer.Option(help="Tokens of every prompt.", min=1)] = 128,
    steps: Annotated[int, typer.Option(help="Steps at the full batch in each round.", min=1)] = 32,
    settle: Annotated[int, typer.Option(help="Full steps before those, which do not count.", min=0)] = 2,
    rounds: Rounds = 3,
    seed: Seed = None,
    ranks_per_gpu: RanksPerGpu = None,
    one_at_a_time: OneAtATime = False,
    out: Out = None,
    name: Name = None,
    plot: Plot = True,
) -> int:
    """ms per token for each global batch, arms in turn."""
    from interlock.bench.arms import parse_arms
    from interlock.bench.decode import DecodeSpec, plan_arms, run_decode
    from interlock.bench.pool import ArmPool, fit_together
    from interlock.bench.prompts import fresh_seed
    from interlock.bench.record import decode_evidence
    from interlock.bench.routing import trace_spread
    from interlock.bench.tables import decode_table
    from interlock.launch import machine_facts

    load = begin(plot)
    arms, facts = parse_arms(arm or [], ranks_per_gpu=ranks_per_gpu), machine_facts()
    spec = DecodeSpec(
        batches=integers("--batch", batch),
        context=context,
        steps=steps,
        rounds=rounds,
        seed=fresh_seed() if seed is None else seed,
        settle=settle,
    )
    plans = plan_arms(arms, model, spec, facts)
    keep = not one_at_a_time and fit_together(list(plans.values()), facts)
    units = len(plans) * len(spec.batches) * rounds + len(plans)
    with ArmPool(plans, keep=keep) as pool, progress(units) as tick:
        result = run_decode(pool, spec, tick)
        spreads = {}
        for each, points in result.points.items():
            tick(f"routing of {each}")
            largest = points[max(points)]
            spreads[each] = trace_spread(pool.get(each), largest.prompts, largest.outputs, spec.batches)
    options = {each.name: each.text for each in arms}
    evidence = decode_evidence(result, options, facts, spreads)
    finish(decode_table(result, spreads), evidence, out, name, plot, load)
    return 0 if evidence.verdict == "measured" else 1


@bench_app.command()
def prefill(
    model: Model,
    chunk: Annotated[str, typer.Option(help="Chunk sizes to ask for, with commas.")] = "512",
    arm: Arms = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of every prompt.", min=1)] = 512,
    prompts: Annotated[int, typer.Option(help="Prompts of one run; 0: enough for four chunks.", min=0)] = 0,
    rounds: Rounds = 3,
    seed: Seed = None,
    ranks_per_gpu: RanksPerGpu = None,
    one_at_a_time: OneAtATime = False,
    out: Out = None,
    name: Name = None,
    plot: Plot = True,
) -> int:
    """Input tokens a second at the chunk that was really run."""
    from interlock.bench.arms import parse_arms
    from interlock.bench.pool import ArmPool, fit_together
    from interlock.bench.prefill import PrefillSpec, key_of, plan_arms, run_prefill
    from interlock.bench.prompts import fresh_seed
    from interlock.bench.record import prefill_evidence
    from interlock.bench.tables import prefill_table
    from interlock.launch import machine_facts

    load = begin(plot)
    arms, facts = parse_arms(arm or [], ranks_per_gpu=ranks_per_gpu), machine_facts()
    spec = PrefillSpec(
        chunks=integers("--chunk", chunk),
        prompt_tokens=prompt_tokens,
        prompts=prompts,
        rounds=rounds,
        seed=fresh_seed() if seed is None else seed,
    )
    plans = plan_arms(arms, model, spec, facts)
    flat = {key_of(each, size): plan for each, by_chunk in plans.items() for size, plan in by_chunk.items()}
    keep = not one_at_a_time and fit_together(list(flat.values()), facts)
    with ArmPool(flat, keep=keep) as pool, progress(len(flat) * rounds) as tick:
        result = run_prefill(pool, plans, spec, tick)
    evidence = prefill_evidence(result, {each.name: each.text for each in arms}, facts)
    finish(prefill_table(result), evidence, out, name, plot, load)
    return 0


@bench_app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="Address of the server, with or without /v1.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second (open loop).")] = None,
    arrivals: Annotated[str, typer.Option(help="Open loop: poisson or fixed.")] = "poisson",
    concurrency: Annotated[int | None, typer.Option(help="Requests in flight (closed loop).")] = None,
    requests: Annotated[int, typer.Option(help="Requests to send.", min=1)] = 64,
    duration: Annotated[float | None, typer.Option(help="Seconds after which the run is cut.")] = None,
    request_timeout: Annotated[float, typer.Option(help="Seconds after which one is given up.")] = 600.0,
    input_tokens: Annotated[int, typer.Option(help="Length of generated prompts.", min=4)] = 128,
    output_tokens: Annotated[int, typer.Option(help="max_tokens of every request.", min=1)] = 64,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help='One prompt a line, text or {"prompt": ...}.')
    ] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    model: Annotated[str | None, typer.Option(help="Model name; default: the first that is served.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length.")] = True,
    warm_up: Annotated[int, typer.Option(help="Requests before the run, of the same shape.", min=0)] = 2,
    ttft_limit: Annotated[float | None, typer.Option(help="Goodput: ms to the first token.")] = None,
    tpot_limit: Annotated[float | None, typer.Option(help="Goodput: ms per token after it.")] = None,
    latency_limit: Annotated[float | None, typer.Option(help="Goodput: ms for the whole answer.")] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ITEM=VALUE", help="The server's plan must say so (ep_size=4), or nothing is run."
        ),
    ] = None,
    max_failures: Annotated[
        float,
        typer.Option(help="Share of failed and incomplete requests that is still a result.", min=0, max=1),
    ] = 0.01,
    seed: Seed = None,
    out: Out = None,
    name: Name = None,
    plot: Plot = True,
) -> int:
    """Load any OpenAI-compatible server. The key comes from INTERLOCK_API_KEY."""
    from interlock.bench.prompts import fresh_seed
    from interlock.bench.record import serve_evidence
    from interlock.bench.serving.arrivals import arrivals_of
    from interlock.bench.serving.figures import Limits
    from interlock.bench.serving.run import ServeSpec, measure_server, read_prompts
    from interlock.bench.tables import serve_table
    from interlock.launch import machine_facts

    load = begin(plot)
    if endpoint not in ("chat", "completions"):
        raise Refusal(
            option="--endpoint",
            given=endpoint,
            rule="is neither chat nor completions",
            alternatives=("--endpoint chat", "--endpoint completions"),
        )
    spec = ServeSpec(
        base_url=base_url,
        arrivals=arrivals_of(arrivals, rate, concurrency),
        requests=requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        seed=fresh_seed() if seed is None else seed,
        seed_given=seed is not None,
        prompts=read_prompts(prompts) if prompts else (),
        model=model,
        endpoint=endpoint,
        ignore_eos=ignore_eos,
        warm_up=warm_up,
        request_timeout=request_timeout,
        duration=duration,
        limits=Limits(_seconds(ttft_limit), _seconds(tpot_limit), _seconds(latency_limit)),
        expect=_items(expect or []),
    )
    with progress(requests) as tick:
        key = os.environ.get("INTERLOCK_API_KEY")
        result = measure_server(spec, key, lambda exchange: tick(exchange.status))
    evidence = serve_evidence(result, machine_facts(), "server", max_failures)
    finish(serve_table(result), evidence, out, name, plot, load)
    if evidence.verdict == "invalid":
        share = result.figures.failure_rate
        console(highlight=False).print(f"invalid: {share:.1%} of the requests failed or did not complete")
        return 1
    return 0


@bench_app.command()
def moe(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Take the sizes of this model.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens of a call, with commas.")] = "1,4,16,64,256",
    hidden: Annotated[int | None, typer.Option(help="Hidden size.", min=1)] = None,
    expert_width: Annotated[int | None, typer.Option(help="Width of an expert.", min=1)] = None,
    experts: Annotated[int | None, typer.Option(help="Experts.", min=1)] = None,
    local_experts: Annotated[
        int | None, typer.Option(help="Experts held here, of --experts (on a GPU).", min=1)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts of a token.", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    runner: Annotated[list[str] | None, typer.Option(help="Only this runner; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kernels: Annotated[str | None, typer.Option(help="Kernel set; default: the fastest there is.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of the CPU.", min=1)] = 1,
    working_set: Annotated[int, typer.Option(help="MiB of weights used in turn.", min=0)] = 256,
    rounds: Rounds = 5,
    seed: Annotated[int, typer.Option(help="Seed of rows and routes.", min=0)] = 0,
    out: Out = None,
    name: Name = None,
    plot: Plot = True,
) -> int:
    """One layer's experts alone, for each runner and layout, beside the device's roofline.

    On a GPU the whole layer from given router logits on, captured in a CUDA graph.
    """
    from interlock.bench.layer_run import LayerRun, layer_shape, measure_layer
    from interlock.bench.tables import layer_table
    from interlock.launch import machine_facts

    load = begin(plot)
    facts = machine_facts()
    shape, facts_of_model = layer_shape(
        model,
        hidden=hidden,
        expert_width=expert_width,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        local_experts=local_experts,
    )
    run = LayerRun(
        shape=shape,
        tokens=integers("--tokens", tokens),
        runners=tuple(runner or ()),
        device=device,
        kernels=kernels,
        threads=threads,
        working_set=working_set << 20,
        rounds=rounds,
        seed=seed,
    )
    with progress(None) as tick:
        points, limits, evidence = measure_layer(run, facts, facts_of_model, tick)
    finish(layer_table(points, limits), evidence, out, name, plot, load)
    return 0


@bench_app.command()
def a2a(
    tokens: Annotated[str, typer.Option(help="Tokens of each rank, with commas.")] = "1,4,16,64",
    ranks: Annotated[int, typer.Option(help="Rank processes.", min=2)] = 2,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden size; default: 576, on a GPU 4096.", min=1)
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Experts of all ranks; default: 24, on a GPU 256.", min=1)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts of a token; 12, on a GPU 8.", min=1)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or fp8; default: float32, on a GPU bfloat16.")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option("--a2a", help="Only this backend; may be repeated.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: GPUs if there are any.")] = None,
    ranks_per_gpu: Annotated[
        int, typer.Option(help="Rehearsal: ranks that share a GPU; such figures are no speeds.", min=1)
    ] = 1,
    rounds: Rounds = 100,
    out: Out = None,
    name: Name = None,
    plot: Plot = True,
) -> int:
    """Dispatch, combine and both alone, over rank processes: time and bandwidth."""
    from interlock.bench.a2a import A2ARun, arms_for, choose_gpus, run_a2a, shape_of
    from interlock.bench.parts_record import a2a_evidence
    from interlock.bench.tables import a2a_table
    from interlock.launch import machine_facts

    load = begin(plot)
    facts = machine_facts()
    gpus = choose_gpus(device, ranks, ranks_per_gpu, facts)
    where = "cpu" if gpus is None else "cuda"
    shape = shape_of(where, hidden=hidden, experts=experts, top_k=top_k, dtype=dtype)
    run = A2ARun(shape=shape, ranks=ranks, tokens=integers("--tokens", tokens), rounds=rounds, gpus=gpus)
    arms = arms_for(run, backend or [], facts)
    with progress(None) as tick:
        tick(f"{len(arms)} arms over {ranks} ranks")
        points = run_a2a(arms, run)
    finish(a2a_table(points, ranks), a2a_evidence(points, run, facts), out, name, plot, load)
    return 0


@bench_app.command("compare")
def compare_runs(
    first: Annotated[Path, typer.Argument(help="Evidence of a run: the baseline.")],
    second: Annotated[Path, typer.Argument(help="Evidence of another; may be the same file.")],
    arms: Annotated[
        str | None, typer.Option(metavar="A,B", help="Arm of the first and of the second run.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="ITEM", help="A difference that is what you compare; repeatable."),
    ] = None,
    require_verified: Annotated[
        bool,
        typer.Option(
            "--require-verified", help="Refuse a speed without accuracy evidence of the same version."
        ),
    ] = False,
) -> int:
    """Compare two runs; refuses unmatched arms and names the difference."""
    from interlock.bench.compare import compare, pick_arms
    from interlock.bench.gate import objections
    from interlock.bench.tables import compare_table
    from interlock.evidence.ledger import default_folders, entries, read_evidence

    names = [part.strip() for part in arms.split(",")] if arms else [None, None]
    if len(names) != 2:
        raise Refusal(
            option="--arms", given=arms or "", rule="needs two names", alternatives=("--arms tp2,ep2",)
        )
    baseline, candidate = read_evidence(first), read_evidence(second)
    comparison = compare(
        baseline, candidate, first_arm=names[0], second_arm=names[1], allow=frozenset(allow or ())
    )
    shown = tuple(pick_arms(e, n)[0].name for e, n in zip((baseline, candidate), names, strict=True))
    console(highlight=False).print(compare_table(comparison, (shown[0], shown[1])))
    ledger = [entry.evidence for entry in entries(default_folders()) if entry.evidence is not None]
    found = [
        text
        for arm in pick_arms(candidate, names[1])
        for text in objections(baseline, candidate, arm, ledger)
    ]
    screen, said = console(highlight=False), "rejected" if require_verified else "note"
    for text in dict.fromkeys(found):
        screen.print(f"{said}: {text}", soft_wrap=True)
    return 1 if found and require_verified else 0


def _items(texts: list[str]) -> dict[str, str]:
    items = {}
    for text in texts:
        item, equals, value = text.partition("=")
        if not equals:
            raise Refusal(
                option="--expect", given=text, rule="needs ITEM=VALUE", alternatives=("--expect ep_size=4",)
            )
        items[item.strip().replace("-", "_")] = value.strip()
    return items


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
