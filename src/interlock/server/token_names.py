"""How single tokens are written in logprobs."""

from __future__ import annotations

from interlock.tokenizer import Tokenizer


class TokenNames:
    """Texts and bytes of tokens, remembered for each id (at most one entry for each id of the vocabulary)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The token's text, special tokens too; ``bytes:\\xe6\\xbc`` for parts of characters."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._read(token_id)
        return text

    def _read(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def label(self, token_id: int, as_id: bool) -> str:
        """``text``, or ``token_id:N`` where the client asked for ids."""
        return f"token_id:{token_id}" if as_id else self.text(token_id)

    def utf8(self, token_id: int) -> list[int]:
        """Bytes that the token stands for; those of adjacent tokens join to UTF-8."""
        return list(self._tokenizer.token_bytes(token_id))
