"""Which rows of a step ``verify`` looks into, and what it asks about them. No torch."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from interlock.engine.batch import Batch
from interlock.engine.messages import Inspection


class StepInspection(msgspec.Struct, frozen=True, kw_only=True):
    """Rows ``start : end`` of the step are of the inspected request; travels in ``StepArrays.inspection``."""

    start: int
    end: int
    request: Inspection


def inspected(batch: Batch) -> Batch:
    """The batch with the inspection of its first request that asks for a trace or brings routes, if any."""
    if batch.chunks:
        members = [chunk.request for chunk in batch.chunks]
    else:
        members = list(batch.requests)
    for index, request in enumerate(members):
        asked = request.inspection
        if asked is not None and (asked.trace or asked.routes):
            start, end = (int(row) for row in batch.arrays.query_start[index : index + 2])
            text = msgspec.json.encode(StepInspection(start=start, end=end, request=asked)).decode()
            return replace(batch, arrays=replace(batch.arrays, inspection=text))
    return batch
