"""A whole run of ``bench serve``: ask the server what it is, fit the prompts, warm up, offer the load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx
import msgspec

from interlock.bench.prompts import text_prompt
from interlock.bench.serving.arrivals import Arrivals
from interlock.bench.serving.exchange import Ask, Exchange, HttpSender
from interlock.bench.serving.figures import Limits, ServeFigures, figures_of
from interlock.bench.serving.load import offer
from interlock.errors import InterlockError, Refusal
from interlock.plan.launch_plan import LaunchPlan

HIT_WARNING = 0.01
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpec:
    """What to offer.

    Attributes:
        input_tokens: wanted length of generated prompts, in the server's tokens (chat template included).
        output_tokens: ``max_tokens`` of every request.
        prompts: texts from a file, used in turn; empty generates prompts that share no prefix.
        seed_given: the user gave the seed, so prompts may repeat those of an earlier run.
        expect: items that the server's plan must have.
    """

    base_url: str
    arrivals: Arrivals
    requests: int
    input_tokens: int
    output_tokens: int
    seed: int
    seed_given: bool = False
    prompts: tuple[str, ...] = ()
    model: str | None = None
    endpoint: str = "completions"
    ignore_eos: bool = True
    warm_up: int = 2
    request_timeout: float = 600.0
    duration: float | None = None
    limits: Limits = field(default_factory=Limits)
    expect: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. ``plan`` and ``receipts`` come from an Interlock server only."""

    model: str
    plan: dict[str, Any] | None = None
    receipts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def typed_plan(self) -> LaunchPlan | None:
        """The plan as this version knows it; None for other servers and other versions."""
        if self.plan is None:
            return None
        try:
            return msgspec.convert(self.plan, LaunchPlan)
        except msgspec.ValidationError:
            return None


@dataclass(frozen=True, slots=True)
class ServeResult:
    """What was asked of a server, what every request got, and the figures of all.

    ``warnings`` say what weakens the figures.
    """

    spec: ServeSpec
    server: ServerFacts
    exchanges: tuple[Exchange, ...]
    figures: ServeFigures
    warnings: tuple[str, ...]


def make_client(
    base_url: str, api_key: str | None, connections: int, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """A client without limits that would delay requests; ``base_url`` with or without /v1."""
    if not base_url.startswith(("http://", "https://")):
        raise Refusal(option="--base-url", given=base_url, rule="must begin with http:// or https://")
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
        transport=transport,
        trust_env=False,
    )


def measure_server(spec: ServeSpec, api_key: str | None, done: Callable[[Exchange], None]) -> ServeResult:
    """``run_serve`` on a client and an event loop of its own."""

    async def run() -> ServeResult:
        async with make_client(spec.base_url, api_key, spec.arrivals.concurrency or 256) as client:
            return await run_serve(client, spec, done)

    return asyncio.run(run())


async def run_serve(
    client: httpx.AsyncClient, spec: ServeSpec, done: Callable[[Exchange], None] = lambda _: None
) -> ServeResult:
    """Measure one server.

    Raises:
        InterlockError: the server does not answer, refuses the warm-up, or is not what ``expect`` says.
    """
    server = await server_facts(client, spec.model)
    check_expected(spec.expect, server)
    sender = HttpSender(client)
    words = await _fit(sender, spec, server.model)
    asks = [_ask(spec, server.model, _prompt(spec, index, words)) for index in range(spec.requests)]
    exchanges = await offer(
        sender,
        asks,
        spec.arrivals,
        seed=spec.seed,
        request_timeout=spec.request_timeout,
        duration=spec.duration,
        done=done,
    )
    figures = figures_of(exchanges, spec.limits)
    return ServeResult(spec, server, tuple(exchanges), figures, tuple(_warnings(spec, figures)))


async def server_facts(client: httpx.AsyncClient, model: str | None) -> ServerFacts:
    """The first served model unless one is given, and an Interlock server's plan."""
    try:
        if model is None:
            answer = await client.get("/v1/models", timeout=CONNECT_SECONDS)
            if answer.status_code == 401:
                raise InterlockError(f"{client.base_url} wants a key: set INTERLOCK_API_KEY")
            answer.raise_for_status()
            model = str(answer.json()["data"][0]["id"])
        answer = await client.get("/plan", timeout=CONNECT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise InterlockError(
            f"{client.base_url} is no OpenAI-compatible server that can be reached: "
            f"{type(error).__name__}: {error}"
        ) from None
    try:
        shown = answer.json() if answer.status_code == 200 else {}
    except ValueError:
        shown = {}
    plan = shown.get("plan") if isinstance(shown, dict) else None
    if not isinstance(plan, dict):
        return ServerFacts(model)
    return ServerFacts(model, plan, shown.get("receipts") or {})


def check_expected(expect: Mapping[str, str], server: ServerFacts) -> None:
    """The label of a run must be what the server really does.

    Raises:
        InterlockError: an item differs or cannot be known; both values are named.
    """
    for item, wanted in expect.items():
        if server.plan is None:
            raise InterlockError(
                f"--expect {item}={wanted}: the server shows no plan, so it cannot be checked"
            )
        if item not in server.plan:
            raise InterlockError(f"--expect {item}={wanted}: the server's plan has no such item")
        found = server.plan[item]
        shown = str(found).lower() if isinstance(found, bool) else str(found)
        if shown != wanted:
            raise InterlockError(f"--expect {item}={wanted}: the server runs {item}={shown}")


def read_prompts(path: str) -> tuple[str, ...]:
    """One prompt a line: plain text, or JSON objects with "prompt"."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(option="--prompts", given=path, rule=f"cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("{"):
            prompts.append(line)
            continue
        try:
            prompts.append(str(msgspec.json.decode(line)["prompt"]))
        except (msgspec.DecodeError, KeyError):
            rule = f'line {number} is no JSON object with "prompt"'
            raise Refusal(option="--prompts", given=path, rule=rule) from None
    if not prompts:
        raise Refusal(option="--prompts", given=path, rule="the file holds no prompt")
    return tuple(prompts)


def _ask(spec: ServeSpec, model: str, prompt: str) -> Ask:
    extra = (("ignore_eos", True),) if spec.ignore_eos else ()
    return Ask(prompt, spec.output_tokens, model, spec.endpoint, extra)


def _prompt(spec: ServeSpec, index: int, words: int) -> str:
    if spec.prompts:
        return spec.prompts[index % len(spec.prompts)]
    return text_prompt(index, words, seed=spec.seed)


async def _fit(sender: HttpSender, spec: ServeSpec, model: str) -> int:
    """Warm up with the shape of the run, and find how many words make a prompt of the wanted length.

    Two lengths tell tokens per word and what the chat template adds, where the server counts tokens; the
    warm-up proper makes the line through them better.
    """
    seen: list[tuple[int, int]] = []
    words = max(1, spec.input_tokens // 2)
    for index in range(2 + spec.warm_up):
        tokens = await _warm(sender, spec, model, index, words)
        if tokens is not None:
            seen.append((words, tokens))
        words = spec.input_tokens if index == 0 else _words_for(spec.input_tokens, seen)
    return words


def _words_for(tokens: int, seen: Sequence[tuple[int, int]]) -> int:
    """Words of a text of ``tokens`` tokens, by the line through the (words, tokens) that were seen."""
    if len({words for words, _ in seen}) < 2:
        return tokens
    slope, start = linear_regression([words for words, _ in seen], [count for _, count in seen])
    return max(1, round((tokens - start) / slope)) if slope > 0 else tokens


async def _warm(sender: HttpSender, spec: ServeSpec, model: str, index: int, words: int) -> int | None:
    exchange = Exchange(index=-1, asked_tokens=spec.output_tokens, due=0.0)
    prompt = (
        _prompt(spec, index, words)
        if spec.prompts
        else text_prompt(spec.requests + index, words, seed=spec.seed)
    )
    await sender.send(_ask(spec, model, prompt), exchange)
    if exchange.status == "failed":
        hint = (
            "; --no-ignore-eos leaves that field out"
            if spec.ignore_eos and "40" in exchange.error[:2]
            else ""
        )
        raise InterlockError(f"the server refused the warm-up request: {exchange.error}{hint}")
    return exchange.prompt_tokens


def _warnings(spec: ServeSpec, figures: ServeFigures) -> Sequence[str]:
    found = []
    if not spec.prompts and (figures.hit_rate or 0) > HIT_WARNING:
        cause = " (the chat template begins all prompts alike)" if spec.endpoint == "chat" else ""
        if spec.seed_given:
            cause = " (--seed repeats the prompts of an earlier run)"
        found.append(
            f"{figures.hit_rate:.0%} of the prompt tokens were found in the prefix cache although no prompts "
            f"should share a prefix{cause}: this is not what computing the prompts costs"
        )
    if figures.short:
        found.append(f"{figures.short} answers were shorter than the {spec.output_tokens} tokens asked for")
    if figures.lateness_most is not None and figures.lateness_most > 0.05:
        found.append(
            f"this client sent up to {figures.lateness_most * 1e3:.0f} ms late (counted in the latencies); "
            f"the machine it runs on is the limit"
        )
    return found
