"""Which phase comes next: what replicas want, and what they agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interlock.moe.terms import Phase


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one replica could do next: upper bounds of tokens for each phase, 0 where it has no work.

    ``phase`` is what it would choose alone.
    """

    phase: Phase | None
    prefill_tokens: int
    decode_tokens: int

    @property
    def tokens(self) -> int:
        """Upper bound of tokens in the phase it would choose."""
        if self.phase is None:
            return 0
        return self.prefill_tokens if self.phase is Phase.PREFILL else self.decode_tokens


def agree(wanted: Sequence[Wanted], last: Phase | None) -> Phase | None:
    """The phase that all replicas run next, from what each wants and the phase that all ran last.

    Phases alternate while both have work somewhere, so neither starves.
    """
    prefill = any(w.prefill_tokens for w in wanted)
    decode = any(w.decode_tokens for w in wanted)
    if prefill and decode:
        return Phase.DECODE if last is Phase.PREFILL else Phase.PREFILL
    if prefill:
        return Phase.PREFILL
    return Phase.DECODE if decode else None
