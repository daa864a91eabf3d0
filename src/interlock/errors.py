"""Errors that are addressed to the user: each says what was given, why it is refused and what would work."""

from __future__ import annotations

from collections.abc import Sequence


class InterlockError(Exception):
    """Base of every error whose message is meant for the user and is shown without a traceback."""


class Refusal(InterlockError):
    """A launch that the planner refuses (exit code 2).

    Args:
        option: the option at fault, as the user spells it on the command line (``--ep-size``).
        given: the value that was given or resolved.
        rule: the rule that forbids it, as a sentence.
        alternatives: nearest combinations that are allowed here, as flags to paste.
    """

    def __init__(self, *, option: str, given: object, rule: str, alternatives: Sequence[str] = ()) -> None:
        self.option = option
        self.given = given
        self.rule = rule
        self.alternatives = tuple(alternatives)
        super().__init__(self._message())

    def _message(self) -> str:
        text = f"{self.option} {self.given}".rstrip() + f": {self.rule}"
        if self.alternatives:
            text += "\nwhat would work: " + "; ".join(self.alternatives)
        return text


class CheckpointError(InterlockError):
    """A checkpoint whose tensors are missing, unexpected, mis-shaped, truncated or ambiguous."""


class StartupError(InterlockError):
    """The engine was built, but what it observed differs from the plan, or a rank failed while starting."""


class EngineDeadError(InterlockError):
    """A rank died or stalled; carries the first error of the rank that failed."""


class RequestError(InterlockError):
    """A client's request that is refused (HTTP 400).

    Args:
        message: what is wrong and what would be accepted.
        param: the request field at fault, in OpenAI's notation.
        code: a short machine-readable code.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.param = param
        self.code = code
        super().__init__(message)
