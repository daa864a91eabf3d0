"""What a request asks its answer to match: the fields of OpenAI, vLLM and SGLang, as one grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from interlock.server.context import ServerContext
from interlock.server.errors import ApiError, bad_request
from interlock.server.protocol import GenerationBody
from interlock.structured.checker import GrammarsBusy
from interlock.structured.compiler import GrammarError
from interlock.structured.schema import exact_schema
from interlock.structured.schema_keywords import SchemaError
from interlock.structured.spec import GrammarSpec

Wish = tuple[str, GrammarSpec]
MAX_CHOICES = 1000
_ANY_OBJECT = {"type": "object"}


def wished_grammar(body: GenerationBody) -> Wish | None:
    """The field that constrains the answer and its grammar; None when none does.

    Raises:
        ApiError: 400 for two such fields, for a malformed one, and for a schema that cannot be enforced.
    """
    wishes = [*_plain_wishes(body), *_response_format(body), *_structured_outputs(body)]
    if not wishes:
        return None
    if len(wishes) > 1:
        raise bad_request(
            f"{wishes[0][0]} and {wishes[1][0]} both constrain the answer; give one of them",
            param=wishes[1][0],
        )
    param, kind, value = wishes[0]
    _check_companions(body, param)
    return param, _spec(param, kind, value)


async def checked(wish: Wish, context: ServerContext) -> GrammarSpec:
    """The grammar of ``wish``, once it was seen to compile.

    Raises:
        ApiError: 400 with the compiler's words, 429 when too many other grammars wait to be tried.
    """
    param, spec = wish
    if not context.engine.plan.card.eos_token_ids:
        raise bad_request(
            f"{param}: this model has no end token, so a constrained answer cannot end", param=param
        )
    try:
        await context.grammars.check(spec)
    except GrammarError as error:
        raise _bad_grammar(param, str(error)) from None
    except GrammarsBusy as error:
        raise ApiError(
            429, f"{param}: {error}; try again later", code="queue_full", headers={"Retry-After": "2"}
        ) from None
    return spec


def schema_text(schema: object, param: str) -> str:
    """A JSON schema in the form that is compiled. Raises ApiError (400) for one that cannot be enforced."""
    try:
        return json.dumps(exact_schema(schema), ensure_ascii=False)
    except SchemaError as error:
        raise _bad_grammar(param, str(error)) from None


def _bad_grammar(param: str, problem: str) -> ApiError:
    return bad_request(f"{param} cannot be used: {problem}", param=param, code="invalid_grammar")


def _plain_wishes(body: GenerationBody) -> list[tuple[str, str, Any]]:
    fields = {
        "guided_json": "json",
        "json_schema": "json",
        "guided_regex": "regex",
        "regex": "regex",
        "guided_grammar": "grammar",
        "ebnf": "grammar",
        "guided_choice": "choice",
    }
    named = [(name, kind, getattr(body, name)) for name, kind in fields.items()]
    return [wish for wish in named if wish[2] is not None]


def _response_format(body: GenerationBody) -> list[tuple[str, str, Any]]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", "json", _ANY_OBJECT)]
    if wanted.json_schema is None:
        raise bad_request("response_format.json_schema is missing", param="response_format.json_schema")
    schema = wanted.json_schema.schema_
    if schema is None:
        param = "response_format.json_schema.schema"
        raise bad_request(f"{param} is missing; json_object asks for any object", param=param)
    return [("response_format.json_schema.schema", "json", schema)]


def _structured_outputs(body: GenerationBody) -> list[tuple[str, str, Any]]:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    named = {
        "json": wanted.json_,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
        "structural_tag": wanted.structural_tag,
    }
    wishes = [
        (f"structured_outputs.{kind}", kind, value) for kind, value in named.items() if value is not None
    ]
    if wanted.json_object:
        wishes.append(("structured_outputs.json_object", "json", _ANY_OBJECT))
    if not wishes:
        raise bad_request("structured_outputs names no constraint", param="structured_outputs")
    return wishes


def _check_companions(body: GenerationBody, param: str) -> None:
    if body.ignore_eos:
        raise bad_request(f"ignore_eos and {param} exclude each other: a grammar ends", param="ignore_eos")
    if body.min_tokens:
        raise bad_request(
            f"min_tokens and {param} exclude each other: the grammar says when the answer may end",
            param="min_tokens",
        )


def _spec(param: str, kind: str, value: Any) -> GrammarSpec:
    match kind:
        case "json":
            return GrammarSpec(kind="json_schema", text=schema_text(_decoded(value, param), param))
        case "choice":
            return GrammarSpec(kind="ebnf", text=_choice_grammar(value, param))
        case "structural_tag":
            text = value if isinstance(value, str) else json.dumps(value)
            return GrammarSpec(kind="structural_tag", text=text)
    if not value:
        raise _bad_grammar(param, "it is empty")
    return GrammarSpec(kind="regex" if kind == "regex" else "ebnf", text=value)


def _decoded(value: Any, param: str) -> Any:
    """SGLang and vLLM take a schema as an object or as its JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _bad_grammar(param, f"it is no JSON: {error}") from None


def _choice_grammar(choices: list[str], param: str) -> str:
    if not choices or len(choices) > MAX_CHOICES or not all(choices):
        raise _bad_grammar(param, f"it must be 1 to {MAX_CHOICES} texts that are not empty")
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
