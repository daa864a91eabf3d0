"""The ``symmetric`` exchange with all ranks on one GPU, each on a stream of this process.

    python benchmarks/gpu_symmetric.py --ranks 8 --tokens 64 --layout masked
    python benchmarks/gpu_symmetric.py --ranks 8 --tokens 4096 --layout contiguous

Every rank's exchanges are one CUDA graph, so nothing but the device decides how long they take; all graphs
run at once. Times are those of the slowest rank. Two counts of bytes are given, since a share of the card's
bandwidth depends on it: *moved* reads and writes every lane's row once each way (what a copy of them would);
*least* reads a token's row once and writes its sum once. Results are checked before anything is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from interlock.kernels.triton.kernels import TritonKernels
from interlock.moe.a2a.base import BufferShape
from interlock.moe.a2a.symmetric.exchange import NOTICE_WORDS, Exchange
from interlock.moe.a2a.symmetric.shape import RegionShape, power_of_two
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase

LIMIT_NS = 5_000_000_000


@dataclass
class Rank:
    """One rank: its exchange, its inputs, its stream, and what it computed."""

    exchange: Exchange
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
        ranks.append(
            Rank(
                exchange=exchange,
                stream=torch.cuda.Stream(),
                x=x.to(torch.float8_e4m3fn) if args.fp8 else x,
                scales=torch.ones(args.tokens, args.hidden // 128, device=device) if args.fp8 else None,
                ids=scores.topk(args.top_k, dim=1).indices.sort(dim=1).values,
                weights=torch.rand(args.tokens, args.top_k, generator=generator, device=device),
                results=torch.zeros(shape.slab_rows, args.hidden, dtype=torch.bfloat16, device=device),
                out=torch.empty(args.tokens, args.hidden, dtype=torch.bfloat16, device=device),
            )
        )
    torch.cuda.synchronize()
    return ranks


def dispatch(rank: Rank, args: argparse.Namespace):  # type: ignore[no-untyped-def]
    slab = args.ranks * args.tokens if args.layout == "masked" else 0
    arrived = rank.exchange.exchange_counts(rank.ids, slab, args.alignment)
    rank.exchange.send_rows(rank.x, rank.scales, rank.weights)
    return arrived


def both(rank: Rank, args: argparse.Namespace) -> None:
    arrived = dispatch(rank, args)
    rank.exchange.return_rows(rank.results, arrived)
    lanes = rank.exchange.results.view(torch.bfloat16).view(-1, args.top_k, args.hidden)
    rank.out = TritonKernels().sum_lanes(lanes[: args.tokens], rank.ids, torch.bfloat16)


def load_kernels(args: argparse.Namespace) -> None:
    """Run everything once with one rank: to load a kernel while another one waits could wait for that one."""
    alone = argparse.Namespace(**{**vars(args), "ranks": 1})
    (rank,) = build(alone)
    rank.exchange._width = power_of_two(args.ranks)
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
                **{
                    name: getattr(args, name)
                    for name in ("ranks", "tokens", "experts", "hidden", "layout", "fp8")
                },
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
