"""Whatever JSON comes as a schema: it is rewritten, or refused by name; nothing else is raised."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.structured.schema import exact_schema
from interlock.structured.schema_keywords import ANNOTATIONS, OF_TYPE, STRUCTURE, TYPES, SchemaError

KEYWORDS = sorted(STRUCTURE.union(*OF_TYPE.values()) | {"title", "x-a", "not"})
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**400, -(10**400), 2**53 + 1]),
    st.floats(allow_nan=True),
    st.sampled_from([*TYPES, "#", "#/$defs/a", "#/x", "a", "", "date", "^a", "["]),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from([*KEYWORDS, "a", "b"])
    return st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3))


SCHEMAS = st.dictionaries(
    st.sampled_from(KEYWORDS), st.recursive(PLAIN, containers, max_leaves=8), max_size=4
)


@settings(max_examples=1000, deadline=None)
@given(schema=SCHEMAS)
def test_anything_is_rewritten_or_refused(schema: dict[str, Any]) -> None:
    try:
        written = exact_schema(schema)
    except SchemaError:
        return
    assert not ANNOTATIONS & written.keys()
    json.dumps(written)
