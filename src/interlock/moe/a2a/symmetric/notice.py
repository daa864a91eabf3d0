"""What the device told the host, as an error that names the rank, what it was waited for, and how long."""

from __future__ import annotations

from collections.abc import Sequence

from interlock.errors import EngineDeadError, InterlockError
from interlock.moe.a2a.contract import ContractError, DispatcherSpec

COUNTS, ROWS, RESULTS, BAD_ID, OVERFLOW, ROUTES, RELEASE = range(1, 8)
_AWAITED = {
    COUNTS: "begin the dispatch (its counts of lanes did not come)",
    ROWS: "finish the dispatch (its rows did not come)",
    RESULTS: "reach the combine (its results did not come)",
    ROUTES: "begin the dispatch (its routes and rows did not come)",
    RELEASE: "give up on the dispatch that this rank gave up on",
}


def problem(words: Sequence[int], spec: DispatcherSpec) -> InterlockError:
    """The error of a notice: code, rank or token, exchange, nanoseconds or detail."""
    code, where, step, detail = words[:4]
    if code in _AWAITED:
        return EngineDeadError(
            f"expert-parallel rank {where} did not {_AWAITED[code]} in exchange {step} within "
            f"{detail / 1e9:.1f} s, as rank {spec.rank} saw it on its device"
        )
    if code == BAD_ID:
        token, lane = divmod(where, spec.top_k)
        return ContractError(
            f"token {token} names expert {detail} (slot {lane}): ids must be in [0, {spec.num_experts}) or -1"
        )
    return ContractError(
        f"row {detail} is beyond what a rank's memory holds (exchange {step}): a token names an expert "
        "twice, or ranks disagree on the capacity"
    )
