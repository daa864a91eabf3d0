"""A tokenizer.json rebuilt from the vocabulary and merges that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from interlock.errors import InterlockError

_CONTROL, _USER_DEFINED = 3, 4
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE with the split rule "smollm": every digit on its own, then GPT-2's rule.

    Raises:
        InterlockError: another kind of vocabulary or split rule.
    """
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if (kind, split) != ("gpt2", "smollm"):
        raise InterlockError(
            f"the GGUF file's tokenizer is {kind!r} with split rule {split!r}; "
            "the demo reads 'gpt2' with 'smollm'"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    for token, token_kind in zip(tokens, kinds, strict=True):
        if token_kind in (_CONTROL, _USER_DEFINED):
            special = token_kind == _CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer


def gguf_tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The parsed tokenizer_config.json: special tokens and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
    for role, key in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config
