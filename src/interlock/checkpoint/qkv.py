"""Row order of a fused qkv tensor. No torch here.

``plain``: all q rows, all k rows, all v rows. ``chunked``: C chunks, each [q | k | v] of its heads; C is the
number of kv heads of a full-attention layer (in every layer); fp8 scale grids restart in each chunk. Both
have the same shape: only the number of scale rows tells them apart, and only where a chunk is no whole number
of blocks (13568 rows in 4 chunks: 108 scale rows, plain: 106).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from interlock.checkpoint.fp8_names import SCALE_SUFFIX, scale_rows
from interlock.checkpoint.index import StoredTensor
from interlock.checkpoint.specs import TensorSpec
from interlock.errors import CheckpointError
from interlock.plan.card import AttentionCard


def detect_layout(
    specs: Iterable[TensorSpec],
    stored: Mapping[str, StoredTensor],
    *,
    block_rows: int,
    requested: str,
) -> str:
    """Row order of all fused tensors of a checkpoint, "plain" or "chunked".

    ``requested``: "auto", "plain" or "chunked".

    Raises:
        CheckpointError: nothing tells the two apart and the user did not say which; or what the user said
            contradicts the scale grids; or layers disagree.
    """
    votes: dict[str, str] = {}
    fused = [spec for spec in specs if spec.fused_groups]
    for spec in fused:
        scale = stored.get(spec.name + SCALE_SUFFIX)
        rows = spec.shape[0]
        flat, restarting = (scale_rows(rows, block_rows, chunks) for chunks in (1, spec.fused_groups))
        if scale is None or flat == restarting or scale.shape[0] not in (flat, restarting):
            continue
        votes.setdefault("plain" if scale.shape[0] == flat else "chunked", spec.name)
    if len(votes) == 2:
        raise CheckpointError(
            f"the scale rows of {votes['plain']} say a plain fused qkv, "
            f"those of {votes['chunked']} a chunked one"
        )
    if all(spec.fused_groups == 1 for spec in fused):
        return "plain"
    seen = next(iter(votes), None)
    if requested == "auto":
        if seen is None:
            raise CheckpointError(
                "the row order of the fused qkv_proj tensors cannot be told from their shapes; say which it "
                "is with --qkv-layout plain ([all q; all k; all v]) or --qkv-layout chunked (one [q; k; v] "
                "chunk for each kv head of a full-attention layer)"
            )
        return seen
    if seen is not None and seen != requested:
        raise CheckpointError(
            f"--qkv-layout {requested}: the scale rows of {votes[seen]} show that the layout is {seen}; "
            "leave --qkv-layout out"
        )
    return requested


def part_rows(attention: AttentionCard, *, chunks: int, part: str, heads: range) -> list[range]:
    """Stored rows of ``heads`` of "q", "k" or "v", in order; neighbouring rows are joined.

    ``chunks`` is 0 where each part is a tensor of its own, else the chunks of a fused tensor.
    """
    sizes = {
        "q": (attention.num_heads, attention.head_dim),
        "k": (attention.num_kv_heads, attention.head_dim),
        "v": (attention.num_kv_heads, attention.v_head_dim),
    }
    count, width = sizes[part]
    if not chunks:
        return [range(heads.start * width, heads.stop * width)]
    names = tuple(sizes)
    before = sum(sizes[name][0] * sizes[name][1] for name in names[: names.index(part)]) // chunks
    chunk_rows = sum(heads * width for heads, width in sizes.values()) // chunks
    runs: list[range] = []
    for head in heads:
        chunk, place = divmod(head, count // chunks)
        first = chunk * chunk_rows + before + place * width
        _append(runs, range(first, first + width))
    return runs


def _append(runs: list[range], run: range) -> None:
    """Append, or lengthen the last run where the new one follows it."""
    if runs and runs[-1].stop == run.start:
        runs[-1] = range(runs[-1].start, run.stop)
    else:
        runs.append(run)
