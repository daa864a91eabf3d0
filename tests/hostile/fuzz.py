"""Tens of thousands of hostile requests: no answer of 5xx, the engine alive, nothing held, memory flat.

python -m tests.hostile.fuzz --requests 50000 [--at-once 16] [--seed 0] [-- server options]
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.e2e.processes import Served
from tests.hostile.cases import Case, Cases
from tests.hostile.watch import Memory, finish, free, is_alive, parser, seconds_until_free, started
from tests.hostile.wire import ANSWER_SECONDS, Answer, Wire

MOST_GROWTH = 0.02
MEMORY_SAMPLES = 100
RUDE_SECONDS = 0.3


@dataclass
class Findings:
    """Counts of what was sent and what came back, and everything that should not have."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def judge(self, case: Case, answer: Answer) -> None:
        self.sent[case.kind] += 1
        self.statuses[answer.status] += 1
        if answer.status >= 500:
            self._fault(case, f"answered {answer.status}: {answer.body[:300]!r}")
        elif answer.status == 0 and case.is_http:
            self._fault(case, "the connection was closed without an answer")
        elif 400 <= answer.status < 500 and answer.media_type.startswith("application/json"):
            try:
                json.loads(answer.body)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                self._fault(case, f"no error object: {answer.body[:300]!r}")

    def unanswered(self, case: Case) -> None:
        self.sent[case.kind] += 1
        self._fault(case, f"no answer within {ANSWER_SECONDS:g} s")

    def _fault(self, case: Case, what: str) -> None:
        if len(self.faults) < 50:
            self.faults.append(f"{case.kind}: {what}; sent {case.payload[:300]!r}")


async def _worker(url: str, cases: Cases, budget: list[int], findings: Findings) -> None:
    wire = Wire(url)
    while budget[0] > 0:
        budget[0] -= 1
        case = cases.next()
        if case.is_http:
            begun = time.monotonic()
            try:
                findings.judge(case, await wire.ask(case.payload))
            except TimeoutError:
                findings.unanswered(case)
                wire.close()
            took = (time.monotonic() - begun, f"{case.kind}: {case.payload[:600]!r}")
            findings.slowest = max(findings.slowest, took)
            continue
        rude = Wire(url)
        try:
            answer = await asyncio.wait_for(rude.ask(case.payload), RUDE_SECONDS)
        except (TimeoutError, ValueError, IndexError):
            answer = Answer(0)
        rude.close()
        findings.judge(case, answer)
    wire.close()


async def _watch(memory: Memory, budget: list[int], total: int) -> None:
    step = max(1, total // MEMORY_SAMPLES)
    due = total
    while budget[0] > 0:
        if budget[0] <= due:
            await asyncio.to_thread(memory.note)
            due -= step
        await asyncio.sleep(0.05)


async def fuzz(served: Served, requests: int, *, at_once: int, seed: int, memory: Memory) -> Findings:
    """Send ``requests`` cases over ``at_once`` connections."""
    findings, cases, budget = Findings(), Cases(seed), [requests]
    workers = [_worker(served.url, cases, budget, findings) for _ in range(at_once)]
    await asyncio.gather(_watch(memory, budget, requests), *workers)
    return findings


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=50_000)
    options.add_argument("--at-once", type=int, default=16)
    given = options.parse_args()
    with started(given.flags) as served:
        memory = Memory(served)
        files = memory.open_files()
        findings = asyncio.run(
            fuzz(served, given.requests, at_once=given.at_once, seed=given.seed, memory=memory)
        )
        settled = seconds_until_free(served)
        alive, held = is_alive(served), not free(served)
        more_files = memory.open_files() - files
        traceback = "Traceback" in served.process.text
    growth = memory.growth()
    missed = [*findings.faults]
    missed += ["the server is not healthy"] * (not alive) + ["pages or slots are held"] * held
    missed += [f"memory grew by {growth:.1%}"] * (growth > MOST_GROWTH)
    missed += ["a traceback in the log"] * traceback
    figures = {
        "requests": sum(findings.sent.values()),
        "by_kind": dict(findings.sent),
        "by_status": {str(status): count for status, count in sorted(findings.statuses.items())},
        "slowest_answer": findings.slowest,
        "memory_growth": round(growth, 4),
        "memory_growth_by_process": memory.growth_by_process(),
        "memory_mib": memory.mib(),
        "open_files_more": more_files,
        "free_after_seconds": round(settled, 3),
    }
    return finish("fuzz", figures, missed)


if __name__ == "__main__":
    sys.exit(main())
