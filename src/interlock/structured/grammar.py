"""What an answer must match, as Python code asks for it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from interlock.errors import RequestError
from interlock.structured.schema import exact_schema
from interlock.structured.schema_keywords import SchemaError
from interlock.structured.spec import GrammarSpec


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint for ``LLM.generate``; made by one of its class methods."""

    spec: GrammarSpec

    @classmethod
    def json_schema(cls, schema: object) -> Grammar:
        """JSON that a schema (an object, or True for any JSON) validates.

        Raises:
            RequestError: no schema, or a keyword in it cannot be enforced.
        """
        try:
            text = json.dumps(exact_schema(schema), ensure_ascii=False)
        except SchemaError as error:
            raise RequestError(f"the schema cannot be used: {error}", param="grammar") from None
        return cls(GrammarSpec(kind="json_schema", text=text))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        return cls(GrammarSpec(kind="regex", text=pattern))

    @classmethod
    def ebnf(cls, grammar: str) -> Grammar:
        """Text of an EBNF grammar whose first rule is ``root``."""
        return cls(GrammarSpec(kind="ebnf", text=grammar))
