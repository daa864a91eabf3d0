"""A model folder's tokenizer: tokenizer.json, its special tokens and its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from interlock.errors import InterlockError, RequestError
from interlock.tokenizer.byte_decoding import ByteDecoder, byte_decoder
from interlock.tokenizer.chat_template import ChatTemplates, Message

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class _ByteTable(dict[int, bytes]):
    """Bytes of each token id, filled as ids appear; an id that the vocabulary lacks has none."""

    def __init__(self, look_up: Callable[[int], bytes]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._look_up(token_id)
        return value


class Tokenizer:
    """Encodes and decodes text, and renders conversations; see ``load_tokenizer``.

    Attributes:
        vocab_size: one more than the largest token id, added tokens included. A model's logits may be wider.
        eos_token_ids: ids that end a generation, the model's preferred one first.
        special_token_ids: ids that ``decode`` leaves out when told to skip special tokens.
        special_tokens: what chat templates see: ``bos_token``, ``eos_token``, ...
        strip_left: how many leading spaces decoding removes from a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        decoder: ByteDecoder,
        special_tokens: Mapping[str, Any],
        eos_token_ids: Sequence[int],
        chat_templates: ChatTemplates,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._decoder = decoder
        self._chat_templates = chat_templates
        self.special_tokens = dict(special_tokens)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_token_ids = tuple(eos_token_ids)
        self.strip_left = decoder.strip_left
        self._all_bytes = _ByteTable(self._look_up_bytes)
        self._kept_bytes: dict[frozenset[int], _ByteTable] = {}

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if the model has one."""
        return self._id_of("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, if the model has one."""
        return self._id_of("pad_token")

    @property
    def chat_template_text(self) -> str:
        """The source of all chat templates, "" without one."""
        return "\n".join(self._chat_templates.sources.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Rendered chat templates carry their own special tokens: pass False for them.

        Raises:
            RequestError: the text holds a lone surrogate, which no UTF-8 text can.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is no valid Unicode: a lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start}; send whole characters",
                code="invalid_unicode",
            ) from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, ids out of the vocabulary nothing."""
        table = self.byte_table(skip_special_tokens)
        text = b"".join([table[i] for i in ids]).decode(errors="replace")
        if not self.strip_left:
            return text
        removed = min(len(text) - len(text.lstrip(" ")), self.strip_left)
        return text[removed:]

    def token_text(self, token_id: int) -> str:
        """One token on its own, special tokens included; a part of a character becomes U+FFFD."""
        return self._all_bytes[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        return self._all_bytes[token_id]

    def byte_table(
        self, skip_special_tokens: bool, kept: frozenset[int] = frozenset()
    ) -> Mapping[int, bytes]:
        """Bytes by token id, as ``Detokenizer`` reads them; ``kept``: special tokens that are text."""
        if not skip_special_tokens:
            return self._all_bytes
        table = self._kept_bytes.get(kept)
        if table is None:
            dropped = self.special_token_ids - kept
            table = _ByteTable(lambda token_id: b"" if token_id in dropped else self._all_bytes[token_id])
            self._kept_bytes[kept] = table
        return table

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; ``kwargs`` are ``continue_final_message`` and template variables.

        Encode the result with ``add_special_tokens=False``: the template has written them.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        return self._chat_templates.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self._backend.token_to_id(token) if isinstance(token, str) else None

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._decoder.token_bytes(token)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Read a model folder's tokenizer.

    Used files: tokenizer.json (required), tokenizer_config.json, special_tokens_map.json, chat_template.jinja
    and additional_chat_templates/, generation_config.json and config.json (ids that end a generation).

    Raises:
        InterlockError: a file is missing or broken, or the vocabulary is of a kind that is not supported.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InterlockError(
            f"{folder} has no tokenizer.json; the fast tokenizer file of the Hugging Face format is needed "
            "(transformers writes it with AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
        )
    try:
        text = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
        decoder = byte_decoder(json.loads(text).get("decoder"))
    except InterlockError as error:
        raise InterlockError(f"{folder}: {error}") from None
    except Exception as error:  # the library raises a bare Exception for a malformed file
        raise InterlockError(f"{path} is no readable tokenizer: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    return Tokenizer(
        backend,
        decoder=decoder,
        special_tokens=special,
        eos_token_ids=_eos_ids(folder, backend, special),
        chat_templates=ChatTemplates(_template_sources(folder, config), special),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InterlockError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InterlockError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, Any]:
    def content(value: Any) -> Any:
        return value.get("content") if isinstance(value, Mapping) else value

    tokens: dict[str, Any] = {}
    for source in (special_map, config):
        for name in _SPECIAL_NAMES:
            value = content(source.get(f"{name}_token"))
            if isinstance(value, str):
                tokens[f"{name}_token"] = value
        more = source.get("additional_special_tokens")
        if isinstance(more, list) and more:
            tokens["additional_special_tokens"] = [content(value) for value in more]
        named = source.get("extra_special_tokens")
        if isinstance(named, Mapping):
            tokens |= {str(name): content(value) for name, value in named.items()}
    return tokens


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None and not ids:
            ids += value if isinstance(value, list) else [value]
    if isinstance(special.get("eos_token"), str):
        own = backend.token_to_id(special["eos_token"])
        ids += [] if own is None else [own]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise InterlockError(f"{folder}: eos_token_id {ids} must be a token id or a list of token ids")
    return tuple(dict.fromkeys(ids))


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A chat_template.jinja file wins over the entry in tokenizer_config.json."""
    sources: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        sources["default"] = entry
    elif isinstance(entry, Mapping):
        sources |= entry
    elif isinstance(entry, list):
        sources |= {item["name"]: item["template"] for item in entry}
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return sources
