"""The terminal chat against the server, with a scripted user."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from interlock.server.chat_client import Terminal, chat, printable, run_chat
from interlock.server.chat_session import ChatError, ChatOptions, ChatSession, TurnStats, api_url
from tests.server.conftest import Serve
from tests.server.fake_engine import FakeEngine
from tests.server.test_disconnect import wait_for


def user(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Types ``lines`` one after another, then leaves; exception classes are raised."""
    script = iter(lines)

    def read_line(_prompt: str) -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read_line


def talk(base_url: str, *lines: str | type[BaseException], **options: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    assert run_chat(base_url, ChatOptions(**options), console=console, read_line=user(*lines)) == 0
    return out.getvalue()


def test_conversation(base_url: str, engine: FakeEngine) -> None:
    """Answers stream to the terminal, and the history goes with each question."""
    engine.script("All [clear].")
    out = talk(base_url, "Signal?", "", "Sure?", "/exit", "never read", max_tokens=20, temperature=0.0)
    assert out.count("All [clear].") == 2
    assert "tiny at http://127.0.0.1" in out
    assert "13 tokens" in out
    assert len(engine.requests) == 2
    assert engine.requests[0].sampling.max_tokens == 20
    assert len(engine.requests[1].token_ids) > len(engine.requests[0].token_ids)


def test_reasoning_is_shown_apart_and_not_kept(serve: Serve) -> None:
    engine, http = serve(reasoning_parser="qwen3")
    engine.script("<think>hm, let me see</think>yes")
    out = talk(str(http.base_url), "Signal?", "Sure?", max_tokens=40)
    assert out.count("hm, let me see\n\nyes") == 2
    with ChatSession(str(http.base_url), ChatOptions(max_tokens=40)) as session:
        thoughts: list[str] = []
        assert "".join(session.ask("Signal?", on_reasoning=thoughts.append)) == "yes"
        assert "".join(thoughts) == "hm, let me see"
        assert session.messages[-1] == {"role": "assistant", "content": "yes"}


def test_commands(base_url: str, engine: FakeEngine) -> None:
    engine.script("ok")
    out = talk(
        base_url,
        "a",
        "/reset",
        "a",
        "/system Be short.",
        "/system",
        "a",
        "/help",
        "/nope",
        KeyboardInterrupt,
        "/quit",
    )
    lengths = [len(request.token_ids) for request in engine.requests]
    assert lengths[0] == lengths[1] < lengths[2]
    assert "Be short." in out
    assert "unknown command /nope" in out
    assert "/exit or Ctrl-D to leave" in out


def test_ctrl_c_stops_the_answer_only(
    base_url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is told, the partial answer stays in the history, and the program goes on."""
    engine.script("abcdef" * 10, delay=0.01)
    real_print = Console.print

    def interrupting(self: Console, *objects: object, **options: object) -> None:
        real_print(self, *objects, **options)
        if objects == ("c",):
            raise KeyboardInterrupt

    monkeypatch.setattr(Console, "print", interrupting)
    with ChatSession(base_url, ChatOptions()) as session:
        out = io.StringIO()
        Terminal(session, Console(file=out, width=100), user("go")).loop()
        assert session.messages[1:] == [{"role": "assistant", "content": "abc"}]
    assert "stopped" in out.getvalue()
    wait_for(lambda: not engine.live)
    assert len(engine.aborted) == 1


def test_errors_are_shown_and_the_question_can_be_repeated(base_url: str, engine: FakeEngine) -> None:
    engine.script("abc", error_at=1)
    with ChatSession(base_url, ChatOptions()) as session:
        with pytest.raises(ChatError, match="scripted fault"):
            list(session.ask("go"))
        assert session.messages == []
        engine.script("abc")
        assert "".join(session.ask("go")) == "abc"
        assert session.last.finish_reason == "stop"
        assert session.last.completion_tokens == 4
    assert "scripted fault" in talk_failing(base_url, engine)


def talk_failing(base_url: str, engine: FakeEngine) -> str:
    engine.script("abc", error_at=1)
    return talk(base_url, "go")


def test_the_command(
    base_url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``interlock chat`` reads standard input and prints to standard output."""
    engine.script("Clear.")
    monkeypatch.setattr("sys.stdin", io.StringIO("Signal?\n"))
    assert chat(base_url, system="Be short.", max_tokens=9, temperature=0.5) == 0
    assert "Clear." in capsys.readouterr().out
    assert engine.requests[0].sampling.temperature == 0.5


def test_wrong_key_and_unreachable_server(serve: Serve) -> None:
    _, http = serve(api_key="right")
    url = str(http.base_url)
    with pytest.raises(ChatError, match="API key"):
        ChatSession(url, ChatOptions(api_key="wrong"))
    with ChatSession(url, ChatOptions(api_key="right")) as session:
        assert session.model == "tiny"
    with pytest.raises(ChatError, match="is the server running"):
        ChatSession("http://127.0.0.1:9", ChatOptions())


def test_urls() -> None:
    assert api_url("http://h:1") == api_url("http://h:1/") == api_url("http://h:1/v1/") == "http://h:1/v1"
    assert api_url("https://h/openai/v1") == "https://h/openai/v1"
    for bad in ("h:1", "ftp://h", ""):
        with pytest.raises(ChatError, match="URL"):
            api_url(bad)


def test_answers_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\r\nc\td 漢👨‍👩") == "a[2Jb\nc\td 漢👨‍👩"


def test_rate_excludes_the_first_token() -> None:
    """K03: absent figures are None, and the decode rate leaves the first token out."""
    stats = TurnStats(0.5, 2.5, 5, 0, 11, "stop")
    assert stats.tokens_per_second == 5.0
    assert TurnStats(None, 1.0, None, None, None, None).tokens_per_second is None
    assert TurnStats(0.5, 0.5, 5, 0, 1, "stop").tokens_per_second is None
