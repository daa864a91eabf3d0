"""Requests that no reasonable client sends, and reasonable ones with something wrong in them; seeded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.hostile.wire import request

VOCAB: Final = 512
JSON_PATHS: Final = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/responses")
OTHER_PATHS: Final = (
    "/flush_cache",
    "/v1/embeddings",
    "/v1/models",
    "/health",
    "/plan",
    "/",
    "/page/app.js",
    "/x",
)
FIELDS: Final = (
    *(
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "top_p",
    ),
    *(
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "n",
    ),
    *(
        "best_of",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "echo",
    ),
    *("stream", "stream_options", "skip_special_tokens", "include_stop_str_in_output", "add_special_tokens"),
    *("priority", "user", "tools", "tool_choice", "response_format", "chat_template_kwargs", "guided_json"),
    *("structured_outputs", "continue_final_message", "add_generation_prompt", "tokens", "input", "suffix"),
    *("return_tokens_as_token_ids", "metadata", "store", "reasoning_effort", "parallel_tool_calls"),
)
NASTY_TEXTS: Final = (
    "",
    " ",
    "\x00",
    "\ufeff",
    "\u202e\u0301" * 40,
    "é" * 100,
    "𝕏" * 50,
    "a" * 5000,
    "<|im_start|>system\n<|im_end|>",
    "{{ ''.__class__.__mro__ }}",
    "../../etc/passwd",
    "\r\nX-Injected: 1",
    "%00%ff",
    "NaN",
    "tiny-random",
    "user",
    "json_schema",
)
NUMBERS: Final = (
    *(
        0,
        -0.0,
        1,
        -1,
        2,
        7,
        19,
        20,
        21,
        VOCAB - 1,
        VOCAB,
        2**31 - 1,
        2**31,
        2**32,
        2**53 + 1,
        2**63,
        -(2**63),
        2**64,
    ),
    *(10**30, -(10**30), 1e308, -1e308, 5e-324, 0.1, 1.5, 1e-7, math.inf, -math.inf, math.nan),
)


@dataclass(frozen=True)
class Case:
    """One request. ``kind`` names its maker in reports; ``is_http`` says whether it is HTTP at all."""

    kind: str
    payload: bytes
    is_http: bool = True


class Cases:
    """An endless row of cases out of one seed."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._makers: tuple[tuple[int, Callable[[], Case]], ...] = (
            (40, self._mutated_body),
            (12, self._broken_json),
            (10, self._token_ids),
            (5, self._deep),
            (5, self._huge_number),
            (5, self._grammar),
            (8, self._headers),
            (6, self._other_endpoint),
            (4, self._path),
            (3, self._wrong_framing),
            (2, self._no_http),
        )

    def next(self) -> Case:
        weights = [weight for weight, _ in self._makers]
        (maker,) = self._dice.choices([maker for _, maker in self._makers], weights)
        return maker()

    # ---- values

    def _value(self, depth: int = 0) -> Any:
        kind = self._dice.randrange(8 if depth < 3 else 5)
        if kind == 0:
            return self._dice.choice((None, True, False))
        if kind in (1, 2):
            return self._dice.choice(NUMBERS)
        if kind in (3, 4):
            return self._dice.choice(NASTY_TEXTS)
        if kind in (5, 6):
            return [self._value(depth + 1) for _ in range(self._dice.randrange(4))]
        return {
            self._dice.choice((*FIELDS, *NASTY_TEXTS)): self._value(depth + 1)
            for _ in range(self._dice.randrange(4))
        }

    def _body(self, path: str) -> dict[str, Any]:
        """A request that would be answered, shortly."""
        text = "".join(self._dice.choice("abc é\n<|{") for _ in range(self._dice.randrange(1, 30)))
        if path == "/tokenize":
            return {"prompt": text}
        if path == "/detokenize":
            return {"tokens": [self._dice.randrange(VOCAB) for _ in range(5)]}
        common = {"model": "tiny-random", "stream": self._dice.random() < 0.3}
        if path == "/v1/responses":
            return {**common, "input": text, "max_output_tokens": 2}
        if path == "/v1/completions":
            return {**common, "prompt": text, "max_tokens": self._dice.randrange(4) or 1}
        return {**common, "messages": [{"role": "user", "content": text}], "max_tokens": 2}

    def _mutated_body(self) -> Case:
        path = self._dice.choice(JSON_PATHS)
        body = self._body(path)
        for _ in range(self._dice.choice((0, 1, 1, 2, 4))):
            name = (
                self._dice.choice((*FIELDS, *body))
                if self._dice.random() < 0.95
                else self._dice.choice(NASTY_TEXTS)
            )
            body[name] = self._value()
        return Case("mutated body", request("POST", path, self._encode(body)))

    def _encode(self, body: object) -> bytes:
        return json.dumps(body, ensure_ascii=self._dice.random() < 0.5).encode("utf-8", "surrogatepass")

    def _broken_json(self) -> Case:
        path = self._dice.choice(JSON_PATHS)
        text = bytearray(self._encode(self._body(path)))
        way = self._dice.randrange(7)
        if way == 0:
            text = text[: self._dice.randrange(len(text))]
        elif way == 1:
            for _ in range(3):
                text[self._dice.randrange(len(text))] = self._dice.randrange(256)
        elif way == 2:
            text = bytearray(self._dice.randbytes(self._dice.randrange(200)))
        elif way == 3:
            text = bytearray(b'{"model":"tiny-random","prompt":"\\ud800","prompt":"\xff\xfe","max_tokens":1}')
        elif way == 4:
            text = bytearray(b"\xef\xbb\xbf") + text
        elif way == 5:
            text = bytearray(
                self._dice.choice((b"", b"null", b"[]", b'"x"', b"NaN", b"1e400", b"{} {}", b"{,}"))
            )
        else:
            text = bytearray(text.decode("utf-8", "replace").encode("utf-16"))
        return Case("broken JSON", request("POST", path, bytes(text)))

    def _token_ids(self) -> Case:
        ids: list[Any] = [self._dice.randrange(-2, VOCAB + 70) for _ in range(self._dice.randrange(12))]
        if self._dice.random() < 0.4:
            ids.append(self._dice.choice((*NUMBERS, "5", True, None, [1], {})))
        if self._dice.random() < 0.05:
            ids = [5] * self._dice.choice((300, 5000, 200_000))
        body = {
            "model": "tiny-random",
            "prompt": self._dice.choice((ids, [ids], [ids, ids], [ids, "x"])),
            "max_tokens": 1,
        }
        if self._dice.random() < 0.3:
            body["stop_token_ids"] = ids
        if self._dice.random() < 0.3:
            body["logit_bias"] = {str(one): self._dice.choice(NUMBERS) for one in ids[:20]}
        return Case("token ids", request("POST", "/v1/completions", self._encode(body)))

    def _deep(self) -> Case:
        depth = self._dice.choice((50, 500, 5000, 100_000))
        opening, closing = self._dice.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"b":', b"}]")))
        inner = opening * depth + b"1" + (closing * depth if self._dice.random() < 0.7 else b"")
        field = self._dice.choice(FIELDS).encode()
        body = b'{"model":"tiny-random","prompt":"x","max_tokens":1,"' + field + b'":' + inner + b"}"
        return Case("deep nesting", request("POST", self._dice.choice(JSON_PATHS), body))

    def _huge_number(self) -> Case:
        digits = b"9" * self._dice.choice((20, 400, 5000, 100_000))
        number = self._dice.choice(
            (digits, b"-" + digits, b"0." + digits, b"1e" + digits[:6], b"1E-" + digits[:6])
        )
        field = self._dice.choice(FIELDS).encode()
        body = b'{"model":"tiny-random","prompt":"x","max_tokens":1,"' + field + b'":' + number + b"}"
        return Case("huge number", request("POST", "/v1/completions", body))

    def _grammar(self) -> Case:
        path = self._dice.choice(("/v1/chat/completions", "/v1/completions"))
        body = self._body(path)
        schema = self._dice.choice(
            (
                self._value(),
                {"type": "object", "properties": {"a": self._value()}},
                {
                    "type": "string",
                    "pattern": self._dice.choice(("(", "(a+)+$", "[", "\\", "a{99999}", "^x*$")),
                },
                {"$ref": "#"},
                {"enum": [self._value() for _ in range(3)]},
            )
        )
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body["response_format"] = self._dice.choice(
            (wanted, {"type": "json_object"}, {"type": self._value()}, schema)
        )
        return Case("grammar", request("POST", path, self._encode(body)))

    # ---- HTTP

    def _headers(self) -> Case:
        junk = self._dice.choice(NASTY_TEXTS).replace("\r", "").replace("\n", "").replace("\x00", "")
        line = self._dice.choice(
            (
                "Content-Type: " + junk,
                "Content-Type: application/json; charset=" + (junk or "utf-7"),
                "Content-Type: multipart/form-data; boundary=x",
                "Content-Encoding: gzip",
                "Accept: " + junk,
                "Accept-Encoding: " + ", ".join(["gzip;q=0.1"] * 200),
                "Authorization: " + junk,
                "Authorization: Bearer " + "x" * 20_000,
                "X-Request-Id: " + junk,
                "traceparent: " + junk,
                "Expect: 100-continue",
                "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13",
                "Cookie: " + "; ".join(f"a{index}=b" for index in range(300)),
                "Origin: " + junk,
                "X-Forwarded-For: " + junk,
                "Host: " + junk,
                "Range: bytes=0-,-1,9999999999999999999-",
                "If-None-Match: " + junk,
                *(["X-Many: 1\r\n" * 90 + "X-Last: 1"]),
            )
        )
        path = self._dice.choice(JSON_PATHS)
        return Case("headers", request("POST", path, self._encode(self._body(path)), line))

    def _other_endpoint(self) -> Case:
        method = self._dice.choice(
            ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW")
        )
        if method == "HEAD":
            method = "GET"
        path = self._dice.choice((*OTHER_PATHS, *JSON_PATHS))
        query = self._dice.choice(("", "?wait=0", "?wait=-1", "?wait=1e999", "?wait=%00", "?" + "a=b&" * 300))
        body = self._encode(self._value()) if method in ("POST", "PUT", "PATCH") else b""
        return Case("other endpoint", request(method, path + query, body))

    def _path(self) -> Case:
        pieces = (
            "/",
            "//",
            "..",
            "%2e%2e",
            "%00",
            "%ff",
            "%",
            ";",
            "v1",
            "page",
            "models",
            "é",
            "a" * 3000,
            "~",
            "{name}",
        )
        path = "/" + "/".join(self._dice.choice(pieces) for _ in range(self._dice.randrange(1, 5)))
        return Case("path", request(self._dice.choice(("GET", "POST")), path))

    def _wrong_framing(self) -> Case:
        body = self._encode(self._body("/v1/completions"))
        line = self._dice.choice(
            (
                "Content-Length: -1",
                "Content-Length: 99999999999999999999999",
                "Content-Length: 0x10",
                "Content-Length: 5, 6",
                "Content-Length: 3\r\nContent-Length: 4",
                "Transfer-Encoding: gzip",
                "Transfer-Encoding: chunked\r\nContent-Length: 4",
            )
        )
        return Case("wrong framing", request("POST", "/v1/completions", body, line), is_http=False)

    def _no_http(self) -> Case:
        raw = self._dice.choice(
            (
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self._dice.randbytes(60),
                b"GET / HTTP/9.9\r\n\r\n",
                b"GET /\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                self._dice.randbytes(100) + b"\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nBad Header: 1\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\n" + b"A: " + b"b" * 100_000 + b"\r\n\r\n",
            )
        )
        return Case("no HTTP", raw, is_http=False)
