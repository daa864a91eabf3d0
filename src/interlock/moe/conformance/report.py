"""What a conformance run found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """Outcome of one suite.

    Attributes:
        kind: "a2a backend" or "expert runner".
        cases: random cases that ran to their end, on all ranks together once.
        checks: single comparisons, for orientation.
        failures: one line each, with the case's own description and seed; empty when all is well.
        coverage: how many cases had each property ("masked", "fp8", "n == T", ...).
        notice: that the ranks shared a GPU; "" where they did not.
    """

    name: str
    kind: str
    ranks: int
    device: str
    seed: int
    cases: int
    checks: int
    seconds: float
    failures: tuple[str, ...] = ()
    coverage: dict[str, int] = field(default_factory=dict)
    notice: str = ""

    @property
    def passed(self) -> bool:
        return not self.failures and self.cases > 0

    def text(self) -> str:
        """The report for people."""
        verdict = "passed" if self.passed else "FAILED"
        lines = [
            f"{self.kind} {self.name}: {verdict}",
            f"  {self.cases} random cases on {self.ranks} rank(s), {self.device}, seed {self.seed}, "
            f"{self.checks} checks, {self.seconds:.1f} s",
            "  covered: " + ", ".join(f"{name} {count}" for name, count in sorted(self.coverage.items())),
        ]
        if self.notice:
            lines.insert(2, f"  {self.notice}")
        return "\n".join(lines + [f"  - {failure}" for failure in self.failures])
