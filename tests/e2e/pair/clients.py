"""What a client of the pair asks, and how it ends: a whole answer, one clear error, or something worse."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, replace
from typing import Any

import httpx

PATH = "/v1/completions"


@dataclass(frozen=True)
class End:
    """Attributes:
    kind: "answer", "error", "gone" (the client went away itself), "hang", or "broken": neither a whole
        answer nor one error that says something.
    text: the answer's text, or what was said.
    """

    kind: str
    seconds: float
    text: str = ""
    status: int = 0
    scores: tuple[float, ...] = ()

    def same(self, other: End) -> bool:
        """The same text, token for token as probable."""
        close = all(abs(a - b) < 1e-5 for a, b in zip(self.scores, other.scores, strict=True))
        return self.text == other.text and close


def bodies(count: int) -> list[dict[str, Any]]:
    """Random requests of every length that the model takes; some share a prefix; greedy or with a seed."""
    rng = random.Random(8)
    made: list[dict[str, Any]] = []
    for index in range(count):
        length = rng.choice([1, 15, 16, 17, 31, 32, 33, 64, rng.randint(1, 190)])
        prompt = [rng.randrange(8, 480) for _ in range(length)]
        if made and rng.random() < 0.3:
            prompt = (rng.choice(made)["prompt"] + prompt)[:190]
        made.append(
            {
                "model": "tiny-random",
                "prompt": prompt,
                "max_tokens": rng.choice([1, 2, 8, 20, 60]),
                "temperature": index % 2,
                "seed": index,
                "ignore_eos": True,
                "logprobs": 0,
            }
        )
    return made


async def ask(url: str, body: dict[str, Any], *, deadline: float, tokens: int | None = None) -> End:
    """Ask and read to the end.

    Args:
        deadline: seconds after which it counts as hanging.
        tokens: of a whole answer, by default those that were asked for.
    """
    begun = time.monotonic()
    wanted = body["max_tokens"] if tokens is None else tokens
    try:
        async with httpx.AsyncClient(timeout=None) as client:
            end = await asyncio.wait_for(read(client, url, body, wanted), deadline)
    except TimeoutError:
        end = End("hang", 0.0)
    except httpx.HTTPError as error:
        end = End("broken", 0.0, f"{type(error).__name__}: {error}")
    except asyncio.CancelledError:
        return End("gone", time.monotonic() - begun)
    return replace(end, seconds=time.monotonic() - begun)


async def read(client: httpx.AsyncClient, url: str, body: dict[str, Any], wanted: int) -> End:
    """How it ended, without the time."""
    async with client.stream("POST", url + PATH, json=body) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return of_events(
                [line[6:] async for line in answer.aiter_lines() if line[:6] == "data: "], wanted
            )
        content = json.loads(await answer.aread())
    if answer.status_code != 200:
        message = content.get("error", {}).get("message", "")
        return End("error" if message else "broken", 0.0, message, answer.status_code)
    (choice,) = content["choices"]
    whole = choice["finish_reason"] == "length" and content["usage"]["completion_tokens"] == wanted
    scores = tuple((choice["logprobs"] or {}).get("token_logprobs") or ())
    return End("answer" if whole else "broken", 0.0, choice["text"], 200, scores)


def of_events(lines: list[str], wanted: int) -> End:
    """A stream is whole with a finish reason, all tokens and no error; an error comes once and last."""
    if not lines or lines[-1] != "[DONE]":
        return End("broken", 0.0, f"the stream ends after {len(lines)} events", 200)
    events = [json.loads(line) for line in lines[:-1]]
    errors = [event["error"]["message"] for event in events if "error" in event]
    choices = [choice for event in events for choice in event.get("choices", ())]
    text = "".join(choice["text"] for choice in choices)
    scores = [score for c in choices for score in (c.get("logprobs") or {}).get("token_logprobs") or ()]
    finish = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    if errors:
        is_clear = len(errors) == 1 and "error" in events[-1] and not finish and bool(errors[0])
        return End("error" if is_clear else "broken", 0.0, errors[0], 200)
    whole = finish == ["length"] and usage[-1:] == [wanted]
    return End("answer" if whole else "broken", 0.0, text, 200, tuple(scores))


def streaming(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"stream": True, "stream_options": {"include_usage": True}}
