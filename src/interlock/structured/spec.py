"""What a request asks its answer to match, as it travels from the front end to the schedulers."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar that was proven to compile within the limits of the front end.

    Attributes:
        kind: what ``text`` is: a JSON schema (already exact, see ``schema.py``), a regular expression that
            the whole answer matches, an EBNF grammar with the rule ``root``, or a structural tag of xgrammar.
        markers: special tokens that the grammar may use as text; all others never match.
        after_token: the constraint begins after this token (the end of reasoning); None is from the start.
    """

    kind: Kind
    text: str
    markers: tuple[int, ...] = ()
    after_token: int | None = None

    @property
    def bounds_strings(self) -> bool:
        """Whether JSON strings have lengths: their grammar lets control characters through."""
        return self.kind in ("json_schema", "structural_tag") and 'Length"' in self.text

    @property
    def key(self) -> bytes:
        """Names the compiled grammar: equal for specs that compile to the same one."""
        source = f"{self.kind}\0{self.markers}\0{self.text}"
        return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
