"""Items of prefill/decode disaggregation: the role of this server and how it reaches the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from interlock.errors import Refusal
from interlock.kv.transfer.base import TransferBackend
from interlock.options import Options
from interlock.plan import decided as from_
from interlock.plan.decided import Decided, asked_integer, asked_text, rule
from interlock.plan.facts import MachineFacts
from interlock.plan.join import package_problem
from interlock.plan.launch_plan import Source

NONE, PREFILL, DECODE = "none", "prefill", "decode"
BOOTSTRAP_PORT: Final = 8998
PEER_SECONDS, QUEUE_SECONDS = 30.0, 300.0
MODE_FLAG: Final = "--disaggregation-mode"
BACKEND_FLAG: Final = "--disaggregation-transfer-backend"


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """The items of this module."""

    mode: Decided[str]
    backend: Decided[str]
    bootstrap_port: Decided[int]
    timeout: Decided[float]
    queue_timeout: Decided[float]

    def items(self) -> dict[str, Decided[Any]]:
        return {
            "disaggregation_mode": self.mode,
            "disaggregation_transfer_backend": self.backend,
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "disaggregation_timeout": self.timeout,
            "disaggregation_queue_timeout": self.queue_timeout,
        }


def decide_disaggregation(
    options: Options,
    backends: Mapping[str, TransferBackend],
    facts: MachineFacts,
    *,
    device: str,
    nnodes: int,
) -> Disaggregation:
    """The role, and a transfer backend that is ready here.

    Raises:
        Refusal: an option that has no effect in this role, or a backend that cannot be used here.
    """
    mode = from_.text(options, "disaggregation_mode")
    if mode.value == NONE:
        _refuse_without_effect(options)
        nothing = f"{MODE_FLAG} none: this server does both phases"
        return Disaggregation(
            mode, rule("", nothing), rule(0, nothing), rule(0.0, nothing), rule(0.0, nothing)
        )
    if nnodes > 1:
        raise Refusal(
            option=MODE_FLAG,
            given=mode.value,
            rule=f"a prefill or decode server runs on one node, and --nnodes is {nnodes}",
            alternatives=["--nnodes 1", f"{MODE_FLAG} none"],
        )
    return Disaggregation(
        mode=mode,
        backend=_backend(options, backends, facts, device),
        bootstrap_port=_bootstrap_port(options, mode.value),
        timeout=_seconds(options, "disaggregation_timeout", PEER_SECONDS),
        queue_timeout=_seconds(options, "disaggregation_queue_timeout", QUEUE_SECONDS),
    )


def transfer_problem(backend: TransferBackend, facts: MachineFacts, device: str) -> str | None:
    """Why a backend cannot be used on this machine, or None."""
    if device not in backend.devices:
        return f"does not move pages of a {device} (only of {' or '.join(sorted(backend.devices))})"
    problem = package_problem(backend.packages, facts)
    if problem is not None:
        return problem
    others = [package_problem([text], facts) for text in backend.one_of]
    if others and None not in others:
        return f"{others[0]}, or one of {', '.join(backend.one_of[1:])}"
    for library in backend.libraries:
        found = facts.libraries.get(library)
        if found is None:
            return f"needs the system library {library}, for which this machine was not probed"
        if found:
            advice = f" ({backend.remedy})" if backend.remedy else ""
            return f"needs the system library {library}: {found}{advice}"
    return None


def _refuse_without_effect(options: Options) -> None:
    for name in ("transfer_backend", "bootstrap_port", "timeout", "queue_timeout"):
        option = f"disaggregation_{name}"
        if options.is_set(option):
            flag = "--" + option.replace("_", "-")
            raise Refusal(
                option=flag,
                given=options.given[option].value,
                rule=f"has no effect without {MODE_FLAG}",
                alternatives=[f"{flag} auto", f"{MODE_FLAG} prefill", f"{MODE_FLAG} decode"],
            )


def _backend(
    options: Options, backends: Mapping[str, TransferBackend], facts: MachineFacts, device: str
) -> Decided[str]:
    problems = {name: transfer_problem(each, facts, device) for name, each in backends.items()}
    ready = sorted((n for n, p in problems.items() if p is None), key=lambda n: (-backends[n].priority, n))
    asked = asked_text(options, "disaggregation_transfer_backend")
    if asked is not None:
        problem = problems[asked.value]
        if problem is not None:
            raise Refusal(
                option=BACKEND_FLAG,
                given=asked.value,
                rule=problem,
                alternatives=[f"{BACKEND_FLAG} {name}" for name in ready] or [f"{MODE_FLAG} none"],
            )
        return asked
    if not ready:
        raise Refusal(
            option=MODE_FLAG,
            given=options.text("disaggregation_mode"),
            rule="no transfer backend is ready here: "
            + "; ".join(f"{name} {problem}" for name, problem in sorted(problems.items())),
            alternatives=[f"{MODE_FLAG} none"],
        )
    reason = "the only transfer backend that is ready here"
    if len(ready) > 1:
        reason = f"the first by priority of those that are ready here ({', '.join(ready)})"
    return rule(ready[0], reason)


def _bootstrap_port(options: Options, mode: str) -> Decided[int]:
    asked = asked_integer(options, "disaggregation_bootstrap_port")
    if mode == DECODE:
        if asked is not None:
            raise Refusal(
                option="--disaggregation-bootstrap-port",
                given=asked.value,
                rule="has no effect on a decode server: each request names its prefill server's port",
                alternatives=["--disaggregation-bootstrap-port auto", f"{MODE_FLAG} prefill"],
            )
        return rule(0, "each request names the port of its prefill server")
    if asked is None:
        return Decided(BOOTSTRAP_PORT, Source.DEFAULT, "default of --disaggregation-bootstrap-port")
    if asked.value > 65535:
        raise Refusal(
            option="--disaggregation-bootstrap-port",
            given=asked.value,
            rule="ports end at 65535",
            alternatives=[f"--disaggregation-bootstrap-port {BOOTSTRAP_PORT}"],
        )
    return asked


def _seconds(options: Options, name: str, default: float) -> Decided[float]:
    if options.is_set(name):
        return from_.number(options, name)
    return Decided(default, Source.DEFAULT, f"default of --{name.replace('_', '-')}")
