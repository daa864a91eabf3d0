"""An arm in this process: the engine's own runner, scheduler and sampler, stepped by hand.

``change`` gets the runner after its weights are loaded, to seed a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from interlock.engine.model_runner import ModelRunner
from interlock.engine.receipts import observe_scheduler
from interlock.engine.sampler import Sampler
from interlock.engine.scheduler import Scheduler
from interlock.launch import plan_launch
from interlock.moe.a2a.contract import ContractError
from interlock.options import OPTIONS, Options
from interlock.parallel.topology import Groups
from interlock.plan.launch_plan import LaunchPlan
from interlock.verify.arm import ArmError, Ask, Scored
from interlock.verify.engine_arm import add_request
from interlock.verify.run import Side

BASE = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 160,
    "kv_memory": "64MiB",
    "max_running_requests": 4,
}
Change = Callable[[ModelRunner], None]


def unchanged(_: ModelRunner) -> None:
    return None


class InProcessArm:
    """See ``interlock.verify.arm.Arm``; one rank."""

    def __init__(self, plan: LaunchPlan, change: Change = unchanged) -> None:
        self.plan: LaunchPlan | None = plan
        torch.manual_seed(plan.seed)
        self._runner = ModelRunner(plan, Groups.single())
        with torch.inference_mode():
            self._runner.load()
            change(self._runner)
            try:
                self._runner.warm_up()
            except ContractError as error:
                raise ArmError(f"did not start: {error}") from None
        self._scheduler = Scheduler(plan)
        self._sampler = Sampler()
        self.receipts: dict[int, dict[str, object]] = {
            0: {
                **self._runner.receipts(),
                **observe_scheduler(self._scheduler),
                "overlap_schedule": False,
                "disaggregation_mode": "none",
                "stall_timeout": plan.stall_timeout,
                "ranks_per_gpu": 1,
                "nnodes": 1,
                "node_rank": 0,
            }
        }

    def score(self, ask: Ask) -> Scored:
        if ask.flush:
            self._scheduler.flush_cache()
        deltas = self._scheduler.add(add_request(ask))
        with torch.inference_mode():
            while self._scheduler.has_work:
                batch = self._scheduler.schedule()
                assert batch is not None
                hidden = self._runner.forward(batch.arrays)
                deltas += self._scheduler.commit(
                    batch, self._sampler.sample_step(batch, hidden, self._runner.logits).result()
                )
        if deltas[-1].finish_reason == "error":
            raise ArmError(deltas[-1].error or "")
        tokens = tuple(token for delta in deltas for token in delta.token_ids)
        prompt = deltas[0].prompt_logprobs or (None,) * len(ask.token_ids)
        return Scored(
            token_ids=ask.token_ids + tokens,
            prompt_len=len(ask.token_ids),
            entries=prompt + tuple(entry for delta in deltas for entry in delta.logprobs),
            chunk_ends=deltas[0].chunk_ends,
            cached_tokens=deltas[-1].cached_tokens,
        )

    def close(self) -> None:
        self._runner.close()


def make_plan(folder: Path, **options: Any) -> LaunchPlan:
    return plan_launch(str(folder), Options.of(**{**BASE, **options}))


def side(
    name: str,
    folder: Path,
    change: Change = unchanged,
    patches: Callable[[], ExitStack] = ExitStack,
    **options: Any,
) -> Side:
    """A side that runs in this process; ``patches`` are in force while its model is built."""
    plan = make_plan(folder, **options)

    def start() -> InProcessArm:
        with closing(patches()):
            return InProcessArm(plan, change)

    return Side(name, as_flags(options), plan, start)


def as_flags(options: Mapping[str, object]) -> str:
    """Options as on a command line."""
    return " ".join(OPTIONS[name].paste(value) for name, value in options.items())
