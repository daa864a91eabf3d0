"""Parsers of tool calls: one for each way in which models write them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from interlock.server.tool_parsers.base import ToolParser
from interlock.server.tool_parsers.hermes import HermesParser
from interlock.server.tool_parsers.marked import DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser
from interlock.server.tool_parsers.xml_calls import QwenCoderParser, XmlParser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "mimo": XmlParser,
    "qwen3_coder": QwenCoderParser,
    "hermes": HermesParser,
    "qwen": HermesParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "kimi_k2": KimiK2Parser,
}
_LINES = re.compile(r"<tool_call>(?:\\n|\n)\s*<function=")


def tool_parser_for(template: str) -> type[ToolParser] | None:
    """The parser for what a chat template writes; None when it knows no tools."""
    if KimiK2Parser.call_opening in template:
        return KimiK2Parser
    if DeepSeekV31Parser.call_opening in template:
        return DeepSeekV3Parser if "```json" in template else DeepSeekV31Parser
    if "<tool_call>" not in template:
        return None
    if "<function=" in template:
        return QwenCoderParser if _LINES.search(template) else XmlParser
    return HermesParser
