"""Settings of the HTTP front end: names, secrets and limits, resolved before the server starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from interlock.errors import StartupError
from interlock.plan.launch_plan import LaunchPlan

_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, float(2**31 - 1)),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
}


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Sampling values for fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, object]) -> SamplingDefaults:
        """Sampling fields of a checkpoint's ``generation_config.json``; nulls and others are ignored.

        Raises:
            StartupError: a field is no number or out of its range.
        """
        chosen: dict[str, float] = {}
        for name, (low, high) in _RANGES.items():
            value = config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise StartupError(
                    f"generation_config.json: {name} is {value!r}; expected {low:g} to {high:g}"
                )
            chosen[name] = value
        top_k = int(chosen.pop("top_k", 0))
        return cls(top_k=max(top_k, 0), **chosen)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the HTTP front end needs besides the launch plan.

    Attributes:
        model_names: names that clients may use in ``model``; the first is reported in answers.
        api_key: expected bearer token; None leaves the server open. Never printed.
        sampling_defaults: values of sampling fields that a request leaves out.
        max_body_bytes: larger request bodies are refused with 413.
        cors_origins: origins that get CORS headers; empty for none.
        request_timeout: seconds after which a request is ended; None is no limit.
        tool_call_parser, reasoning_parser: names, "auto" (from the chat template) or "none".
        max_waiting: requests beyond the running ones that may wait, over all replicas; more are
            refused with 429. None is no limit.
        max_choices: prompts x n that one HTTP request may ask for.
        max_logprobs: alternatives for each token that a request may ask for.
    """

    model_names: tuple[str, ...]
    api_key: str | None = field(default=None, repr=False)
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    max_body_bytes: int = 16 * 1024 * 1024
    max_waiting: int | None = None
    cors_origins: tuple[str, ...] = ()
    request_timeout: float | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_choices: int = 2048
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        if not self.model_names:
            raise ValueError("model_names is empty")
        if self.api_key is not None and not self.api_key:
            raise StartupError("--api-key is empty; give a key or leave the option out")

    @classmethod
    def from_plan(
        cls,
        plan: LaunchPlan,
        *,
        api_key: str | None = None,
        generation_config: Mapping[str, object] | None = None,
    ) -> ServerSettings:
        """Settings for ``plan``: its served model name and the checkpoint's sampling defaults."""
        return cls(
            model_names=(plan.served_model_name,),
            api_key=api_key,
            sampling_defaults=SamplingDefaults.from_generation_config(generation_config or {}),
            max_body_bytes=plan.max_request_bytes,
            max_waiting=plan.max_waiting_requests or None,
            cors_origins=tuple(origin.strip() for origin in plan.cors_origins.split(",") if origin.strip()),
            request_timeout=plan.request_timeout or None,
            tool_call_parser=plan.tool_call_parser,
            reasoning_parser=plan.reasoning_parser,
        )
