"""What every endpoint shares: the engine, the tokenizer, the settings and what is derived from them."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.engine.client_protocol import EngineClient
from interlock.server.chat_formats import ChatFormats
from interlock.server.errors import ApiError, bad_request
from interlock.server.gate import Gate
from interlock.server.metrics import Metrics
from interlock.server.prompts import ContextLimit
from interlock.server.settings import ServerSettings
from interlock.server.token_names import TokenNames
from interlock.server.tracing import Tracer
from interlock.structured.checker import GrammarChecker
from interlock.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class ServerContext:
    """Attributes that are not obvious:

    vocab_size: token ids that clients send must lie below.
    created: unix time at which the server started.
    fingerprint: ``system_fingerprint`` of answers; names the launch plan.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: Metrics
    tracer: Tracer
    gate: Gate
    names: TokenNames
    chat_formats: ChatFormats
    grammars: GrammarChecker
    limit: ContextLimit
    vocab_size: int
    created: int
    fingerprint: str

    def detokenizer(
        self, *, skip_special_tokens: bool, continues: bool, kept: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A fresh incremental decoder.

        Args:
            continues: for an answer, which goes on after its prompt.
            kept: special tokens that are text all the same.
        """
        return Detokenizer(self.tokenizer, skip_special_tokens, continues=continues, kept=kept)

    def live_requests(self) -> int:
        """Choices that were submitted and have not ended; every request of the engine comes through here."""
        return self.metrics.live

    def check_model(self, name: str | None) -> None:
        """Refuse a model this server does not serve (404). None passes."""
        if name is not None and name not in self.settings.model_names:
            raise ApiError(
                404,
                f"model {name[:100]!r} is not served here; served: {', '.join(self.settings.model_names)}",
                param="model",
                code="model_not_found",
            )

    def check_choices(self, prompts: int, n: int) -> None:
        """Refuse more choices than one HTTP request may have."""
        if prompts * n > self.settings.max_choices:
            raise bad_request(
                f"{prompts} prompts x n = {n} are {prompts * n} choices; at most {self.settings.max_choices}",
                param="n",
            )

    def check_queue(self) -> None:
        """Refuse with 429 when more requests wait than the settings allow.

        What the schedulers reported last may be a step old; so those that were submitted since, beyond what
        can run at once, count as waiting too.
        """
        if self.settings.max_waiting is None:
            return
        plan = self.engine.plan
        places = plan.max_running_requests * plan.attn_dp_size
        reported = sum(stats.waiting for stats in self.engine.stats())
        waiting = max(reported, self.live_requests() - places)
        if waiting >= self.settings.max_waiting:
            raise ApiError(
                429,
                f"{waiting} requests are waiting, the limit is {self.settings.max_waiting}; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
