"""What ``verify`` found out about one prompt, and all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from interlock.verify.attribute import Attribution
from interlock.verify.compare import Comparison, Outcome


class Cause(StrEnum):
    """Why two arms differ on a prompt."""

    CHUNKS = "chunk boundaries"
    PREFIX = "prefix-cache hit"
    FLIP = "routing flip"
    ORDER = "reduction order"
    GRAPHS = "decode graphs"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a difference.

    Attributes:
        details: one sentence with the place and the numbers.
        explained: the cause accounts for all of the difference and is no fault.
        attribution: where the layers part, when they were traced.
    """

    cause: Cause
    details: str
    explained: bool
    attribution: Attribution | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One prompt.

    Attributes:
        cold: prompt and continuation, nothing cached.
        warm: the continuation again, on the prefix that the cold run left in the cache; None when not run.
        chunks: where the prefill steps of control and candidate ended.
    """

    index: int
    label: str
    tokens: int
    continuation: int
    cold: Comparison
    warm: Comparison | None
    chunks: tuple[tuple[int, ...], tuple[int, ...]]
    cached: tuple[int, int]
    diagnosis: Diagnosis | None = None

    @property
    def comparison(self) -> Comparison:
        """The worse of cold and warm."""
        order = list(Outcome)
        if self.warm is not None and order.index(self.warm.outcome) > order.index(self.cold.outcome):
            return self.warm
        return self.cold

    @property
    def outcome(self) -> Outcome:
        return self.comparison.outcome

    @property
    def passes(self) -> bool:
        """Equal, equal but for rounding, or explained."""
        return self.outcome is not Outcome.DIFFERENT or (
            self.diagnosis is not None and self.diagnosis.explained
        )
