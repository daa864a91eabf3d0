"""The MoE items: a2a backend, runner and the layout of each phase, decided from declarations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.errors import Refusal
from interlock.moe.terms import Layout, Phase
from interlock.options import Options
from interlock.plan.card import ModelCard
from interlock.plan.decided import Decided, asked_integer, asked_text, rule
from interlock.plan.join import Declarations, Situation, a2a_problem, candidates, exchanges, shared_layout

if TYPE_CHECKING:
    from interlock.moe.a2a.backend import A2ABackend


@dataclass(frozen=True, slots=True)
class Experts:
    """How the experts are fed and computed. ``runner`` is "none" in a model without experts."""

    runner: Decided[str]
    layout_prefill: Decided[Layout]
    layout_decode: Decided[Layout]


def decide_a2a(
    options: Options, card: ModelCard, declared: Declarations, here: Situation, tp: int
) -> tuple[Decided[str], A2ABackend]:
    """The a2a backend, checked against everything but the EP size. ``tp``: ranks of the world."""
    name = asked_text(options, "moe_a2a_backend") or _auto_a2a(options, card, declared, here, tp)
    backend = declared.a2a[name.value]
    if card.experts is None and exchanges(backend):
        raise Refusal(
            option="--moe-a2a-backend",
            given=name.value,
            rule="this model has no experts, so the option would have no effect",
            alternatives=_other_backends(declared, card, here),
        )
    _refuse_a2a(name.value, backend, declared, card, here)
    return name, backend


def _auto_a2a(
    options: Options, card: ModelCard, declared: Declarations, here: Situation, tp: int
) -> Decided[str]:
    """Where --ep-size spreads the experts: the backend of highest declared priority that was ever run and
    works here with some runner. Nothing is exchanged otherwise, and where none does."""
    still = next(backend.name for backend in declared.a2a.values() if not exchanges(backend))
    if card.experts is None:
        return rule(still, "the model has no experts")
    ep = asked_integer(options, "ep_size")
    if ep is None or ep.value < 2:
        return rule(still, "no --ep-size spreads the experts over ranks")
    verdicts: list[str] = []
    for backend in sorted(declared.a2a.values(), key=lambda backend: (-backend.priority, backend.name)):
        if backend.priority == 0:
            continue
        problem = a2a_problem(backend, here.with_ep_size(ep.value))
        if problem is None and backend.never_run:
            problem = f"was never run: it wants {backend.never_run}"
        if problem is None and backend.requires_full_ep and ep.value != tp:
            problem = f"needs different experts on every rank, and --ep-size {ep.value} is not {tp}"
        if problem is None and all(found for _, found in candidates(backend, declared.runners, here)):
            problem = "has no runner here"
        if problem is None:
            passed = f" (passed over: {'; '.join(verdicts)})" if verdicts else ""
            return rule(backend.name, f"--ep-size {ep.value} spreads the experts{passed}")
        verdicts.append(f"{backend.name} {problem}")
    return rule(still, f"nothing that exchanges is chosen by itself here: {'; '.join(verdicts)}")


def check_a2a(backend: A2ABackend, card: ModelCard, declared: Declarations, here: Situation) -> None:
    """Check again, now that ``here.ep_size`` is known."""
    if card.experts is not None:
        _refuse_a2a(backend.name, backend, declared, card, here)


def decide_experts(
    options: Options, card: ModelCard, backend: A2ABackend, declared: Declarations, here: Situation
) -> Experts:
    """The runner, and the layout that it shares with the backend in each phase."""
    if card.experts is None:
        layout = rule(Layout.REPLICATED, "the model has no experts")
        if (given := asked_text(options, "moe_runner_backend")) is not None:
            raise Refusal(
                option="--moe-runner-backend",
                given=given.value,
                rule="this model has no experts, so the option would have no effect",
                alternatives=["--moe-runner-backend auto"],
            )
        return Experts(rule("none", "the model has no experts"), layout, layout)
    runner = _decide_runner(options, backend, declared, here)
    layouts = {phase: shared_layout(backend, declared.runners[runner.value], phase) for phase in Phase}
    reason = f"both --moe-a2a-backend {backend.name} and runner {runner.value} declare it for this phase"
    prefill, decode = layouts[Phase.PREFILL], layouts[Phase.DECODE]
    assert prefill is not None, "pair_problem found one"
    assert decode is not None, "pair_problem found one"
    return Experts(runner, rule(prefill, reason), rule(decode, reason))


def _decide_runner(
    options: Options, backend: A2ABackend, declared: Declarations, here: Situation
) -> Decided[str]:
    verdicts = {runner.name: problem for runner, problem in candidates(backend, declared.runners, here)}
    working = [name for name, problem in verdicts.items() if problem is None]
    given = asked_text(options, "moe_runner_backend")
    if given is not None:
        problem = verdicts[given.value]
        if problem is None:
            return given
        alternatives = [f"--moe-runner-backend {name}" for name in working]
        if here.weight_format not in declared.runners[given.value].weight_formats:
            alternatives.append("--quantization fp8")
        raise Refusal(
            option="--moe-runner-backend",
            given=given.value,
            rule=f"with --moe-a2a-backend {backend.name}: {problem}",
            alternatives=alternatives,
        )
    if not working:
        reasons = "; ".join(f"{name} {problem}" for name, problem in verdicts.items())
        raise Refusal(
            option="--moe-a2a-backend",
            given=backend.name,
            rule=f"no --moe-runner-backend can serve it here: {reasons}",
        )
    chosen = working[0]
    better = "; ".join(f"{name} {problem}" for name, problem in _before(verdicts, chosen))
    runner = declared.runners[chosen]
    held = here.dtype if runner.dequantises else here.weight_format
    reason = (
        f"first of {', '.join(working)} by declared priority: computes {held} weights on {here.device} "
        f"in layouts of --moe-a2a-backend {backend.name}"
    )
    return rule(chosen, reason + (f" (passed over: {better})" if better else ""))


def _before(verdicts: dict[str, str | None], chosen: str) -> list[tuple[str, str | None]]:
    names = list(verdicts)
    return [(name, verdicts[name]) for name in names[: names.index(chosen)]]


def _refuse_a2a(
    name: str, backend: A2ABackend, declared: Declarations, card: ModelCard, here: Situation
) -> None:
    problem = a2a_problem(backend, here)
    if problem is not None:
        raise Refusal(
            option="--moe-a2a-backend",
            given=name,
            rule=problem,
            alternatives=_other_backends(declared, card, here),
        )


def _other_backends(declared: Declarations, card: ModelCard, here: Situation) -> list[str]:
    return [
        f"--moe-a2a-backend {other.name}"
        for other in declared.a2a.values()
        if a2a_problem(other, here) is None and (card.experts is not None or not exchanges(other))
    ]
