"""Items of the HTTP front end and of what the process tells about itself: addresses, keys, logs, traces."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan import decided as from_
from interlock.plan.decided import Decided, asked_text
from interlock.plan.facts import TRACING_PACKAGES, MachineFacts
from interlock.plan.launch_plan import Source


def server_items(options: Options, facts: MachineFacts) -> dict[str, Decided[Any]]:
    """Plan items by name.

    Raises:
        Refusal: a port that does not exist, or traces that cannot be sent from this machine.
    """
    port = from_.integer(options, "port")
    if port.value > 65535:
        raise Refusal(
            option="--port", given=port.value, rule="ports end at 65535", alternatives=["--port 8000"]
        )
    key = next((name for name in ("api_key", "api_key_file") if options.is_set(name)), None)
    return {
        "host": from_.text(options, "host"),
        "port": port,
        "api_key_set": Decided(True, Source.USER, options.origin(key))
        if key
        else Decided(False, Source.DEFAULT, "default of --api-key"),
        "evidence": from_.text(options, "evidence"),
        "log_level": from_.text(options, "log_level"),
        "log_format": from_.text(options, "log_format"),
        "drain_timeout": from_.number(options, "drain_timeout"),
        "otlp_endpoint": _otlp_endpoint(options, facts),
        "tool_call_parser": from_.text(options, "tool_call_parser"),
        "reasoning_parser": from_.text(options, "reasoning_parser"),
        "cors_origins": _cors_origins(options),
        "max_waiting_requests": from_.asked_integer(options, "max_waiting_requests")
        or Decided(0, Source.DEFAULT, "default of --max-waiting-requests: no limit"),
        "request_timeout": from_.number(options, "request_timeout"),
        "max_request_bytes": from_.integer(options, "max_request_bytes"),
    }


def _cors_origins(options: Options) -> Decided[str]:
    asked = asked_text(options, "cors_origins")
    if asked is None:
        return Decided("", Source.DEFAULT, "default of --cors-origins: no CORS headers")
    for origin in asked.value.split(","):
        url = urlsplit(origin.strip())
        if origin.strip() != "*" and (url.scheme not in ("http", "https") or not url.netloc or url.path):
            raise Refusal(
                option="--cors-origins",
                given=asked.value,
                rule=f"{origin.strip()!r} is no origin (scheme, host and port, without a path)",
                alternatives=["--cors-origins https://chat.example.org,http://localhost:3000"],
            )
    return asked


def _otlp_endpoint(options: Options, facts: MachineFacts) -> Decided[str]:
    asked = asked_text(options, "otlp_endpoint")
    if asked is None:
        return Decided("", Source.DEFAULT, "default of --otlp-endpoint: no traces")
    url = urlsplit(asked.value)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise Refusal(
            option="--otlp-endpoint",
            given=asked.value,
            rule="is no http:// or https:// address of an OTLP collector",
            alternatives=["--otlp-endpoint http://127.0.0.1:4318"],
        )
    missing = [name for name in TRACING_PACKAGES if name not in facts.packages]
    if missing:
        raise Refusal(
            option="--otlp-endpoint",
            given=asked.value,
            rule=f"traces need {' and '.join(missing)}, not installed here; pip install 'interlock[otel]'",
        )
    return asked
