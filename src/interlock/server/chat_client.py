"""``interlock chat``: a conversation in the terminal."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import closing, suppress

from rich.console import Console
from rich.markup import escape

from interlock.server.chat_session import ChatError, ChatOptions, ChatSession, TurnStats

HELP = """/reset           forget the conversation
/system [TEXT]   show or set the system message (setting it forgets the conversation)
/help            this list
/exit            leave (or Ctrl-D)
Ctrl-C stops an answer, not the program."""

_KEPT_CONTROLS = "\n\t"


def printable(text: str) -> str:
    """``text`` without control characters, so that no answer can steer the terminal."""
    return "".join(
        char for char in text if char in _KEPT_CONTROLS or (char.isprintable() or char == "\u200d")
    )


def run_chat(
    base_url: str,
    options: ChatOptions,
    *,
    console: Console | None = None,
    read_line: Callable[[str], str] | None = None,
) -> int:
    """Talk until the user leaves.

    Args:
        base_url: an OpenAI-compatible server, with or without ``/v1``.
        console: where to write; standard output by default.
        read_line: reads one line after a prompt; raises EOFError at the end. The terminal by default.

    Returns:
        The exit code.

    Raises:
        ChatError: the server cannot be reached at the start.
    """
    console = console or Console(highlight=False)
    if read_line is None:
        with suppress(ImportError):
            importlib.import_module("readline")  # line editing and history for input()
    with ChatSession(base_url, options) as session:
        console.print(
            f"[bold]{escape(session.model)}[/] at {escape(session.url)}   [dim]/help for commands[/]"
        )
        Terminal(session, console, read_line or console.input).loop()
    return 0


def chat(
    url: str,
    *,
    model: str | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    api_key: str | None = None,
) -> int:
    """``run_chat`` on standard input and output, with its options spelled out."""
    options = ChatOptions(
        model=model, api_key=api_key, system=system, temperature=temperature, max_tokens=max_tokens
    )
    return run_chat(url, options)


class Terminal:
    """Reads lines, runs commands and prints answers until the user leaves."""

    def __init__(self, session: ChatSession, console: Console, read_line: Callable[[str], str]) -> None:
        self._session = session
        self._console = console
        self._read_line = read_line

    def loop(self) -> None:
        while True:
            try:
                line = self._read_line("\n[bold cyan]you>[/] ").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._console.print("[dim]/exit or Ctrl-D to leave[/]")
                continue
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._answer(line)

    def _command(self, line: str) -> bool:
        """Run a command; False ends the program."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self._session.reset(system=self._session.system)
                self._console.print("[dim]conversation forgotten[/]")
            case "/system" if argument:
                self._session.reset(system=argument)
                self._console.print("[dim]system message set, conversation forgotten[/]")
            case "/system":
                self._console.print(
                    self._session.system or "[dim]no system message[/]", markup=not self._session.system
                )
            case "/help":
                self._console.print(HELP, markup=False)
            case _:
                self._console.print(f"[red]unknown command {escape(name)}[/]")
                self._console.print(HELP, markup=False)
        return True

    def _answer(self, question: str) -> None:
        stopped = False
        thoughts = _Thoughts(self._console)
        try:
            with closing(self._session.ask(question, on_reasoning=thoughts.show)) as pieces:
                for piece in pieces:
                    thoughts.end()
                    self._console.print(
                        printable(piece), end="", markup=False, highlight=False, soft_wrap=True
                    )
        except KeyboardInterrupt:
            stopped = True
        except ChatError as error:
            self._console.print(f"\n[red]{escape(printable(str(error)))}[/]")
            return
        self._console.print()
        if self._session.last is not None:
            self._console.print(f"[dim]{_summary(self._session.last, stopped=stopped)}[/]")


class _Thoughts:
    """Shows reasoning dim, and apart from the answer that follows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = False

    def show(self, text: str) -> None:
        self._open = True
        self._console.print(
            printable(text), end="", style="dim italic", markup=False, highlight=False, soft_wrap=True
        )

    def end(self) -> None:
        if self._open:
            self._console.print("\n")
        self._open = False


def _summary(stats: TurnStats, *, stopped: bool) -> str:
    parts = ["stopped"] if stopped else [stats.finish_reason or "ended"]
    if stats.completion_tokens is not None:
        parts.append(f"{stats.completion_tokens} tokens")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.first_token_seconds is not None:
        parts.append(f"first after {stats.first_token_seconds * 1000:.0f} ms")
    if stats.prompt_tokens is not None:
        cached = f", {stats.cached_tokens} cached" if stats.cached_tokens else ""
        parts.append(f"prompt {stats.prompt_tokens}{cached}")
    return " | ".join(parts)
