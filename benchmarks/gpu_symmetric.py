"""The ``symmetric`` exchange with all ranks on one GPU, each on a stream of this process.

    python benchmarks/gpu_symmetric.py --ranks 8 --tokens 64 --layout masked
    python benchmarks/gpu_symmetric.py --ranks 8 --tokens 4096 --layout contiguous

Every rank's exchanges are one CUDA graph, so nothing but the device decides how long they take; all graphs
run at once. Times are those of the slowest rank; those of steps with few tokens also come from the device's
clock, read by each program of a launch when it begins and ends, all ranks together and one alone. Two counts
of bytes are given, since a share of the card's bandwidth depends on it: *moved* reads and writes every lane's
row once each way (what a copy of them would); *least* reads a token's row once and writes its sum once.
Results are checked before anything is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from interlock.kernels.triton.kernels import TritonKernels
from interlock.moe.a2a.backend import BufferShape
from interlock.moe.a2a.symmetric.exchange import NOTICE_WORDS, Exchange
from interlock.moe.a2a.symmetric.pulled import PROGRAMS_AN_SM, PulledExchange
from interlock.moe.a2a.symmetric.shape import RegionShape, power_of_two
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase

LIMIT_NS = 5_000_000_000
FACTS = ("ranks", "tokens", "experts", "hidden", "layout", "fp8")
STEPS = 64
"""Steps whose stamps are kept, as ``pulled_kernels.STAMPED_STEPS``."""


@dataclass
class Rank:
    """One rank: its exchange, its inputs, its stream, and what it computed."""

    exchange: Exchange
    pulled: PulledExchange
    stamps: torch.Tensor
    stream: torch.cuda.Stream
    x: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    results: torch.Tensor
    out: torch.Tensor


def region_shape(args: argparse.Namespace) -> RegionShape:
    element = 1 if args.fp8 else 2
    layout = Layout(args.layout)
    return RegionShape.of(
        BufferShape(
            ranks=args.ranks,
            num_experts=args.experts,
            top_k=args.top_k,
            hidden_size=args.hidden,
            row_bytes=args.hidden * element,
            scale_bytes=4 * args.hidden // 128 if args.fp8 else 0,
            result_bytes=args.hidden * 2,
            capacity=dict.fromkeys(Phase, args.tokens),
            layouts=dict.fromkeys(Phase, layout),
            alignment=args.alignment,
        )
    )


def waiting(ranks: int) -> int:
    """Programs that may wait of each of ``ranks`` ranks that share this card with nobody else."""
    return torch.cuda.get_device_properties(0).multi_processor_count * PROGRAMS_AN_SM // ranks


def build(args: argparse.Namespace) -> list[Rank]:
    shape = region_shape(args)
    experts = place(args.experts, args.ranks)
    device = torch.device("cuda", 0)
    regions = [torch.zeros(shape.region_bytes, dtype=torch.uint8, device=device) for _ in experts]
    addresses = [region.data_ptr() for region in regions]
    ranks = []
    for rank, region in enumerate(regions):
        generator = torch.Generator(device).manual_seed(rank)
        x = torch.randn(args.tokens, args.hidden, generator=generator, device=device).bfloat16()
        scores = torch.rand(args.tokens, args.experts, generator=generator, device=device)
        notice = torch.zeros(NOTICE_WORDS, dtype=torch.int64, pin_memory=True)
        exchange = Exchange(shape, experts, rank, region, addresses, notice, LIMIT_NS)
        stamps = torch.zeros(2, STEPS, 1024, 2, dtype=torch.int64, device=device)
        pulled = PulledExchange(exchange, waiting(args.ranks), stamps)
        slab = pulled.result_slab
        if not few(args):
            slab = torch.zeros(shape.slab_rows, args.hidden // 2, dtype=torch.int32, device=device)
        ranks.append(
            Rank(
                exchange=exchange,
                pulled=pulled,
                stamps=stamps,
                stream=torch.cuda.Stream(),
                x=x.to(torch.float8_e4m3fn) if args.fp8 else x,
                scales=torch.ones(args.tokens, args.hidden // 128, device=device) if args.fp8 else None,
                ids=scores.topk(args.top_k, dim=1).indices.sort(dim=1).values,
                weights=torch.rand(args.tokens, args.top_k, generator=generator, device=device),
                results=slab.view(torch.bfloat16),
                out=torch.empty(args.tokens, args.hidden, dtype=torch.bfloat16, device=device),
            )
        )
    torch.cuda.synchronize()
    return ranks


def few(args: argparse.Namespace) -> bool:
    """Whether slabs are exchanged in one launch each way."""
    return region_shape(args).is_few(args.tokens)


def dispatch(rank: Rank, args: argparse.Namespace):  # type: ignore[no-untyped-def]
    slab = args.ranks * args.tokens if args.layout == "masked" else 0
    if few(args):
        return rank.pulled.dispatch(rank.x, rank.scales, rank.ids, rank.weights, slab)
    arrived = rank.exchange.exchange_counts(rank.ids, slab, args.alignment)
    rank.exchange.send_rows(rank.x, rank.scales, rank.weights)
    return arrived


def combine(rank: Rank, args: argparse.Namespace, arrived) -> None:  # type: ignore[no-untyped-def]
    if few(args):
        rank.out = rank.pulled.combine(rank.results, rank.ids, arrived, args.ranks * args.tokens)
        return
    rank.exchange.return_rows(rank.results, arrived)
    lanes = rank.exchange.results.view(torch.bfloat16).view(-1, args.top_k, args.hidden)
    rank.out = TritonKernels().sum_lanes(lanes[: args.tokens], rank.ids, torch.bfloat16)


def both(rank: Rank, args: argparse.Namespace) -> None:
    combine(rank, args, dispatch(rank, args))


def load_kernels(args: argparse.Namespace) -> None:
    """Run everything once with one rank: to load a kernel while another one waits could wait for that one."""
    alone = argparse.Namespace(**{**vars(args), "ranks": 1})
    (rank,) = build(alone)
    rank.exchange.width = power_of_two(args.ranks)
    both(rank, alone)
    torch.cuda.synchronize()
    assert not rank.exchange.notice[0], rank.exchange.notice.tolist()


def check(ranks: list[Rank], args: argparse.Namespace) -> None:
    """Rows in the order (expert, rank, token), then sums of rows that the experts return as they are."""
    for rank in ranks:
        with torch.cuda.stream(rank.stream):
            rank.arrived = dispatch(rank, args)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    ids = torch.stack([rank.ids for rank in ranks]).flatten()
    tokens = torch.stack([rank.x.view(torch.uint8) for rank in ranks]).flatten(0, 1)
    order = ids.argsort(stable=True)
    experts = place(args.experts, args.ranks)
    for held, rank in zip(experts, ranks, strict=True):
        assert not rank.exchange.notice[0], rank.exchange.notice.tolist()
        arrived = rank.arrived  # type: ignore[attr-defined]
        mine = order[(ids[order] >= held.start) & (ids[order] < held.stop)]
        starts = (arrived.psum - arrived.counts).long()
        counts = torch.bincount(ids[mine] - held.start, minlength=len(held))
        assert torch.equal(counts.int(), arrived.counts)
        first = counts.cumsum(0) - counts
        local = ids[mine] - held.start
        where = starts[local] + torch.arange(len(mine), device=mine.device) - first[local]
        got = rank.exchange.rows.view(torch.uint8)[where]
        assert torch.equal(got, tokens[mine // args.top_k]), "rows are not where they belong"
        rank.results[where] = rank.exchange.rows.view(rank.x.dtype)[where].to(torch.bfloat16)
    for rank in ranks:
        with torch.cuda.stream(rank.stream):
            combine(rank, args, rank.arrived)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    for rank in ranks:
        assert torch.equal(rank.out, (rank.x.float() * args.top_k).bfloat16()), "sums are wrong"
        with torch.cuda.stream(rank.stream):
            both(rank, args)
    torch.cuda.synchronize()
    for rank in ranks:
        assert not rank.exchange.notice[0], rank.exchange.notice.tolist()
        assert torch.equal(rank.out, (rank.x.float() * args.top_k).bfloat16()), "sums are wrong"


def measure(ranks: list[Rank], work: Callable[[Rank], object], repeats: int, rounds: int) -> list[float]:
    """Microseconds of one ``work``, the slowest rank's, by round."""
    graphs = []
    for rank in ranks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=rank.stream):
            for _ in range(repeats):
                work(rank)
        graphs.append(graph)
    torch.cuda.synchronize()
    times = []
    for number in range(rounds + 2):
        begun = torch.cuda.Event(enable_timing=True)
        ended = [torch.cuda.Event(enable_timing=True) for _ in ranks]
        begun.record()
        for rank, graph, end in zip(ranks, graphs, ended, strict=True):
            rank.stream.wait_event(begun)
            with torch.cuda.stream(rank.stream):
                graph.replay()
            end.record(rank.stream)
        torch.cuda.synchronize()
        if number >= 2:
            times.append(max(begun.elapsed_time(end) for end in ended) * 1e3 / repeats)
    for rank in ranks:
        assert not rank.exchange.notice[0], rank.exchange.notice.tolist()
    return times


def stamped(ranks: list[Rank], args: argparse.Namespace, last: int) -> dict[str, float]:
    """Of the last ``last`` steps, on the device's clock: from the first program's start to the last's end.

    Medians over steps of the slowest and of the median rank, for dispatch and combine; and of the time
    between starts of steps.
    """
    found: dict[str, float] = {}
    for index, name in enumerate(("dispatch", "combine")):
        spans, begins = [], []
        for rank in ranks:
            epoch = int(rank.exchange.state[0])
            steps = [(epoch - back) % STEPS for back in range(last - 1, -1, -1)]
            programs = rank.pulled.programs((args.tokens, args.hidden), 2)[index]
            flat = rank.stamps[index].flatten()[: STEPS * programs * 2]
            table = flat.view(STEPS, programs, 2)[steps]
            begins.append(table[..., 0].amin(1))
            spans.append(table[..., 1].amax(1) - begins[-1])
        span = torch.stack(spans) / 1e3
        found[f"{name}_slowest_us"] = round(float(span.amax(0).median()), 2)
        found[f"{name}_median_us"] = round(float(span.median()), 2)
        found[f"{name}_fastest_us"] = round(float(span.min()), 2)
        if last > 1:
            period = torch.stack(begins).diff(dim=1) / 1e3
            found["step_us"] = round(float(period.median()), 2)
    return found


def alone(ranks: list[Rank], args: argparse.Namespace, sharing: int) -> dict[str, float]:
    """One rank whose peers have arrived: their flags lie ahead, their rows and results are those of a step.

    ``sharing`` 1: with the programs that a rank has on a GPU of its own.
    """
    rank = ranks[0]
    shape = rank.exchange.shape
    for name in ("flags", "published"):
        rank.exchange.section(name, torch.int32).fill_(int(rank.exchange.state[0]) + 1_000_000)
    rank.pulled = PulledExchange(rank.exchange, waiting(sharing), rank.stamps)
    assert shape.few_tokens
    measure([rank], lambda rank: both(rank, args), args.repeats, args.rounds)
    return stamped([rank], args, min(args.repeats, STEPS) - 2)


def floors(args: argparse.Namespace) -> dict[str, float]:
    """Microseconds that the bytes take at the card's copy bandwidth, of all ranks and of one: each token's
    row is read once and written once for each lane; each lane's result is read and each sum written once."""
    row, result = args.hidden * (1 if args.fp8 else 2), args.hidden * 2
    tokens = args.tokens
    out, home = (tokens * row * (1 + args.top_k), tokens * result * (1 + args.top_k))
    rate = args.copy_bandwidth * 1e6
    return {
        "all_dispatch_floor_us": round(args.ranks * out / rate, 2),
        "all_combine_floor_us": round(args.ranks * home / rate, 2),
        "one_dispatch_floor_us": round(out / rate, 2),
        "one_combine_floor_us": round(home / rate, 2),
    }


def few_report(ranks: list[Rank], args: argparse.Namespace) -> dict[str, object]:
    """Figures of a step of one launch each way. ``together``: all ranks at once on the one card; their
    launches wait for each other. ``alone``: see ``alone``."""
    two = median(measure(ranks, lambda rank: both(rank, args), args.repeats, args.rounds))
    report: dict[str, object] = {
        "both_us": round(two, 1),
        "programs": ranks[0].pulled.programs((args.tokens, args.hidden), 2),
        "together": stamped(ranks, args, min(args.repeats, STEPS) - 4),
        **floors(args),
    }
    for sharing in (args.ranks, 1):
        report[f"alone_with_programs_of_{sharing}_on_a_gpu"] = alone(ranks, args, sharing)
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layout", choices=("masked", "contiguous"), default="masked")
    parser.add_argument("--alignment", type=int, default=128)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--copy-bandwidth", type=float, default=4.27, help="TB/s, read and written")
    args = parser.parse_args()
    with torch.inference_mode():
        load_kernels(args)
        ranks = build(args)
        check(ranks, args)
        facts = {name: getattr(args, name) for name in FACTS}
        if few(args):
            print(json.dumps({**facts, **few_report(ranks, args)}))
            return
        one = median(measure(ranks, lambda rank: dispatch(rank, args), args.repeats, args.rounds))
        two = median(measure(ranks, lambda rank: both(rank, args), args.repeats, args.rounds))
    lanes = args.ranks * args.tokens * args.top_k
    tokens = args.ranks * args.tokens
    row, result = args.hidden * (1 if args.fp8 else 2), args.hidden * 2
    moved = 2 * lanes * (row + result)
    least = (lanes + tokens) * (row + result)
    print(
        json.dumps(
            {
                **facts,
                "dispatch_us": round(one, 1),
                "combine_us": round(two - one, 1),
                "both_us": round(two, 1),
                "moved_TB_s": round(moved / two / 1e6, 3),
                "moved_share_of_copy": round(moved / two / 1e6 / args.copy_bandwidth, 3),
                "least_TB_s": round(least / two / 1e6, 3),
                "least_share_of_copy": round(least / two / 1e6 / args.copy_bandwidth, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
