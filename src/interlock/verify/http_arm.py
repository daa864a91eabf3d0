"""A running server as an arm: OpenAI's ``/v1/completions`` with token ids and log-probabilities.

Servers that echo the prompt with log-probabilities and name tokens by id (Interlock, vLLM, SGLang) score a
text in one request. Others (llama.cpp) are asked for the next token after prefixes, a spread of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from interlock.engine.messages import TokenLogprob
from interlock.plan.launch_plan import LaunchPlan
from interlock.verify.arm import ArmError, Ask, Scored

TIMEOUT_SECONDS = 600.0
MOST_PREFIXES = 48
ID_PREFIX = "token_id:"


class HttpArm:
    """See ``Arm``. It cannot force tokens, so it is the control; its own greedy tokens are forced elsewhere.

    Args:
        url: with or without ``/v1``.
        model: name to ask for; by default the first one that is served.
        prefixes: most prompt positions that are scored where the server does not echo.
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, prefixes: int = MOST_PREFIXES
    ) -> None:
        self.plan: LaunchPlan | None = None
        self.receipts: dict[int, dict[str, object]] = {}
        if not url.startswith(("http://", "https://")):
            raise ArmError(f"{url}: must begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS, headers=headers)
        self._prefixes = prefixes
        self._echoes: bool | None = None
        served = self._first_model()
        self._model = model or str(served.get("id", ""))
        self.max_length = _integer(served.get("max_model_len")) or _integer(
            (served.get("meta") or {}).get("n_ctx")
        )

    def score(self, ask: Ask) -> Scored:
        """Score ``ask``; its ``flush`` and ``inspection`` cannot be had over HTTP.

        Raises:
            ArmError: no answer, or one without log-probabilities by token id.
        """
        if ask.forced:
            raise ArmError("a server over HTTP cannot be made to decode given tokens; use it as the control")
        if self._echoes is not False:
            answer = self._post(self._body(ask.token_ids, ask, echo=True, logprobs=ask.alternatives))
            scored = _echoed(answer, ask)
            self._echoes = scored is not None
            if scored is not None:
                return scored
        return self._score_by_prefixes(ask)

    def close(self) -> None:
        self._client.close()

    def _score_by_prefixes(self, ask: Ask) -> Scored:
        generated = self._next(ask.token_ids, ask, ask.continuation)
        entries: list[TokenLogprob | None] = [None] * len(ask.token_ids)
        for position in _spread(len(ask.token_ids), self._prefixes):
            entries[position] = self._next(ask.token_ids[:position], ask, 1)[0]
        tokens = tuple(entry.token_id for entry in generated)
        return Scored(ask.token_ids + tokens, len(ask.token_ids), (*entries, *generated))

    def _next(self, token_ids: Sequence[int], ask: Ask, count: int) -> list[TokenLogprob]:
        """The next ``count`` greedy tokens with their alternatives."""
        answer = self._post(self._body(token_ids, ask, max_tokens=count, logprobs=ask.alternatives))
        entries = _generated(answer)
        if len(entries) != count:
            raise ArmError(
                f"{self.url} returned log-probabilities of {len(entries)} tokens where {count} were asked for"
            )
        return entries

    def _body(self, token_ids: Sequence[int], ask: Ask, **changes: Any) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": ask.continuation,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            **changes,
        }

    def _first_model(self) -> dict[str, Any]:
        models = self._request("GET", "/v1/models").get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise ArmError(f"{self.url}/v1/models lists no model")
        return models[0]

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._request("POST", "/v1/completions", json=body)

    def _request(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        try:
            answer = self._client.request(method, self.url + path, **content)
            value = answer.json() if answer.is_success else None
        except httpx.HTTPError as error:
            raise ArmError(f"{self.url}{path} does not answer: {error}") from None
        except ValueError:
            raise ArmError(f"{self.url}{path} did not answer with JSON") from None
        if not isinstance(value, dict):
            raise ArmError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
        return value


def _logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices") or [{}]
    return choices[0].get("logprobs") or {}


def _echoed(answer: dict[str, Any], ask: Ask) -> Scored | None:
    """The whole text's entries, or None where the server does not echo them by token id."""
    logprobs = _logprobs(answer)
    labels = logprobs.get("tokens") or []
    if len(labels) != len(ask.token_ids) + ask.continuation or not all(map(_is_id, labels)):
        return None
    tokens = tuple(map(_id, labels))
    values, tops = logprobs["token_logprobs"], logprobs.get("top_logprobs") or [None] * len(labels)
    if tokens[: len(ask.token_ids)] != ask.token_ids or any(value is None for value in values[1:]):
        return None
    entries = [
        None if value is None else TokenLogprob(token, value, _alternatives(top))
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]
    return Scored(tokens, len(ask.token_ids), tuple(entries))


def _generated(answer: dict[str, Any]) -> list[TokenLogprob]:
    """Generated tokens in llama.cpp's form (``content`` with ids), or OpenAI's with ids as labels."""
    logprobs = _logprobs(answer)
    content = logprobs.get("content")
    if isinstance(content, list):
        return [
            TokenLogprob(
                entry["id"],
                entry["logprob"],
                tuple((top["id"], top["logprob"]) for top in entry.get("top_logprobs", ())),
            )
            for entry in content
            if isinstance(entry, dict) and "id" in entry
        ]
    labels = logprobs.get("tokens") or []
    if not all(map(_is_id, labels)):
        return []
    tops = logprobs.get("top_logprobs") or [None] * len(labels)
    return [
        TokenLogprob(_id(label), value, _alternatives(top))
        for label, value, top in zip(labels, logprobs["token_logprobs"], tops, strict=True)
    ]


def _alternatives(top: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    return tuple((_id(label), value) for label, value in (top or {}).items() if _is_id(label))


def _is_id(label: object) -> bool:
    return isinstance(label, str) and label.startswith(ID_PREFIX) and label[len(ID_PREFIX) :].isdecimal()


def _id(label: str) -> int:
    return int(label.removeprefix(ID_PREFIX))


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _spread(length: int, count: int) -> list[int]:
    """Up to ``count`` positions from 1 to ``length`` - 1, evenly spread, both ends included."""
    if length - 1 <= count:
        return list(range(1, length))
    return sorted({1 + round(i * (length - 2) / (count - 1)) for i in range(count)})
