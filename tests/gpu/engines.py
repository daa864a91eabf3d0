"""One rank's runner in this process, and how far its logits are from exact ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from interlock import SamplingParams
from interlock.engine.execution import StepExecutor
from interlock.engine.messages import AddRequest
from interlock.engine.model_runner import ModelRunner
from interlock.engine.scheduler import Scheduler
from interlock.launch import plan_launch
from interlock.options import Options
from interlock.parallel.topology import Groups
from tests.gpu.models import PROMPTS


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[ModelRunner]:
    base = {"max_model_len": 256, "kv_memory": "256MiB", "max_running_requests": 8}
    plan = plan_launch(str(folder), Options.of(**base, **options))
    with torch.inference_mode(), closing(ModelRunner(plan, Groups.single())) as runner:
        runner.load()
        runner.warm_up()
        yield runner


def prompt_logits(runner: ModelRunner) -> list[torch.Tensor]:
    """Logits [T, V] of every prompt, each computed alone."""
    scheduler = Scheduler(runner.plan)
    executor = StepExecutor(runner)
    found = []
    for index, prompt in enumerate(PROMPTS):
        request = AddRequest(
            request_id=str(index), token_ids=prompt, sampling=SamplingParams(max_tokens=1, temperature=0.0)
        )
        assert scheduler.add(request) == []
        batch = scheduler.schedule()
        assert batch is not None
        assert len(batch.arrays.token_ids) == len(prompt)
        found.append(runner.logits(runner.forward(batch.arrays)).float().cpu())
        scheduler.commit(batch, executor.launch(batch).result())
        scheduler.flush_cache()
    return found


def relative_errors(runner: ModelRunner, exact: Sequence[torch.Tensor]) -> torch.Tensor:
    """Relative error of every row's logits [rows], ascending."""
    found, wanted = torch.cat(prompt_logits(runner)), torch.cat(list(exact))
    return ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).sort().values
