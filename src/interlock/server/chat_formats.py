"""How the served model writes tool calls and reasoning: by option, or read off its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from interlock.server.chat_output import OutputFormat
from interlock.server.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format_for
from interlock.server.settings import ServerSettings
from interlock.server.tool_parsers import TOOL_PARSERS, tool_parser_for
from interlock.server.tool_parsers.base import Tool, ToolParser
from interlock.server.tool_parsers.marked import KimiK2Parser
from interlock.structured.forms import after_reasoning
from interlock.structured.spec import GrammarSpec
from interlock.tokenizer import Tokenizer


def _parser_of_vocabulary(tokenizer: Tokenizer) -> type[ToolParser] | None:
    """Kimi K2's first template shows tools and no calls; the markers are in the vocabulary."""
    texts = {tokenizer.token_text(token) for token in tokenizer.special_token_ids}
    return KimiK2Parser if KimiK2Parser.opening in texts else None


@dataclass(frozen=True)
class ChatFormats:
    """Attributes:
    parser, reasoning: None where the model writes none that is known.
    markers: special tokens of both formats, which must not be left out of the text.
    reasoning_end: the token that ends the reasoning, None where it is no single token.
    """

    parser: type[ToolParser] | None
    reasoning: ReasoningFormat | None
    markers: frozenset[int]
    reasoning_end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: ServerSettings) -> ChatFormats:
        """The formats of ``tokenizer``'s templates, or those that ``settings`` name."""
        template = tokenizer.chat_template_text
        if settings.tool_call_parser == "auto":
            parser = tool_parser_for(template) or _parser_of_vocabulary(tokenizer)
        else:
            parser = TOOL_PARSERS.get(settings.tool_call_parser)
        if settings.reasoning_parser == "auto":
            reasoning = reasoning_format_for(template)
        else:
            reasoning = REASONING_FORMATS.get(settings.reasoning_parser)
        special = {tokenizer.token_text(token): token for token in tokenizer.special_token_ids}
        calls = [special[text] for text in (parser.markers if parser else ()) if text in special]
        around = (reasoning.opening, reasoning.closing) if reasoning else ()
        thoughts = [special[text] for text in around if text in special]
        end = tokenizer.encode(reasoning.closing, add_special_tokens=False) if reasoning else []
        return cls(
            parser=parser,
            reasoning=reasoning,
            markers=frozenset(calls + thoughts),
            reasoning_end=end[0] if len(end) == 1 else None,
        )

    def output(
        self, prompt: str, tools: Sequence[Tool], *, single_call: bool, separate: bool, show: bool
    ) -> OutputFormat:
        """How an answer to ``prompt`` is read.

        Args:
            tools: empty when no call is expected.
            separate: take the reasoning out of the content; ``show``: and hand it to the client.
        """
        reasoning = self.reasoning if separate else None
        return OutputFormat(
            reasoning=reasoning,
            starts_inside=reasoning is not None and reasoning.starts_inside(prompt),
            shows_reasoning=show,
            parser=self.parser if tools else None,
            tools=tools,
            single_call=single_call,
        )

    def constrained(self, spec: GrammarSpec, prompt: str) -> GrammarSpec:
        """``spec`` for the answer to ``prompt``, leaving the reasoning before it free.

        Where the prompt ends inside the reasoning, the constraint begins after the token that ends it; where
        the model may begin one, a reasoning is part of the grammar.
        """
        form = self.reasoning
        if form is not None and form.starts_inside(prompt) and self.reasoning_end is not None:
            spec = msgspec.structs.replace(spec, after_token=self.reasoning_end)
        elif form is not None and not form.is_over(prompt):
            inside = form.starts_inside(prompt)
            spec = after_reasoning(spec, "" if inside else form.opening, form.closing)
        if spec.kind == "structural_tag":
            spec = msgspec.structs.replace(spec, markers=tuple(sorted(self.markers)))
        return spec
