"""Log lines: readable, parseable, one line each whatever is in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.logs import REQUEST_ID, JsonFormatter, TextFormatter, configure, fields


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers, logger.level = handlers, level
    logging.captureWarnings(False)


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("interlock.test", logging.INFO, __file__, 1, message, (), None)
    made.fields = extra
    return made


@given(st.text(), st.dictionaries(st.sampled_from(["path", "choice"]), st.text() | st.integers()))
def test_a_line_is_one_object_or_one_line(message: str, values: dict[str, object]) -> None:
    """Whatever a client puts into a path, it cannot forge a second line."""
    line = JsonFormatter().format(record(message, **values))
    assert line.isascii()
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["message"] == message
    assert {name: parsed[name] for name in values} == values
    pairs = TextFormatter().format(record("answered", **values)).split("answered", 1)[1]
    assert pairs.isascii()
    assert not set(pairs) & {"\n", "\r", "\x1b"}


def test_text_has_fields_and_the_request() -> None:
    token = REQUEST_ID.set("r-1")
    try:
        line = TextFormatter(rank=3).format(record("answered", path="/v1/x y", seconds=0.25, none=None))
    finally:
        REQUEST_ID.reset(token)
    assert line.endswith('INFO interlock.test: answered path="/v1/x y" seconds=0.25 request_id=r-1 rank=3')


def test_exceptions_are_part_of_the_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        made = record("failed")
        made.exc_info = (type(error), error, error.__traceback__)
    parsed = json.loads(JsonFormatter().format(made))
    assert "ValueError: broken" in parsed["exception"]
    assert "test_exceptions" in parsed["exception"]


def test_everything_goes_to_one_handler(root: logging.Logger) -> None:
    """Other libraries' chatter is left out, their warnings are not."""
    stream = io.StringIO()
    configure("info", "json", stream=stream)
    logging.getLogger("uvicorn.error").info("Uvicorn running on ...")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("interlock").info("ready", extra=fields(port=1))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["Invalid HTTP request received.", "ready"]
    assert lines[1]["port"] == 1
    configure("debug", "text", stream=stream)
    assert len(root.handlers) == 1
