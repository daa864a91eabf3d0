"""A small byte-level BPE tokenizer with a ChatML-like template, trained from a built-in text in plain Python.

Training here (rather than with a library's trainer) keeps the files identical on every machine and version.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from interlock.tokenizer.byte_decoding import byte_level_alphabet

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The split rule of Qwen2 (and so of MiMo-V2): contractions, words, single digits, punctuation, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TRAINING_TEXT = """
A railway signal may show proceed only when the whole route ahead is set, locked and proven clear. The
levers in the signal box are interlocked, so that no lever can be pulled until the others stand as they
must. The signalman reads the bell, sets the points, locks them, and then clears the signal; the train
runs through the junction and the section behind it is held at danger until the last wagon has passed.
Nothing here depends on memory or on care alone: the frame itself refuses a wrong move, and it refuses
before anything has moved.

The same thought serves a computer that answers questions. Many experts work side by side, and every word
that comes in is sent to a few of them. Each expert sends its answer back, the answers are weighed and
added, and the next layer begins. If one message is lost, if one number lands in the wrong place, the
sentence that comes out is wrong, and often nobody can see why. So the machine should say what it will do
before it does it, check that it was done, and stop with a clear reason when the two differ. What is the
time? It's seven o'clock, and we're early; they'll come when they're ready, I've been told, but don't wait
for them. She said that she would write to us again in the morning. He had not thought about the question
for a long time, and there was no good answer.

def route(tokens, experts, top_k=2):
    scores = [expert.score(token) for token in tokens for expert in experts]
    return sorted(scores, reverse=True)[:top_k]

for i in range(10):
    print("step", i, "of", 10, {"token": i, "text": "hello world", "done": False})

Winter came early that year, and the river froze from one bank to the other. Children walked across it to
the school, the baker carried bread over it on a sledge, and for some weeks the ferry lay still. When the
ice broke at last, with a noise like thunder, everybody ran out to look. The water rose over the road,
took the lower fence and the old boat, and left the field grey with mud. By April the grass was green, by
May there were lambs, and nobody spoke of the cold any more. Numbers such as 1, 2, 3, 4, 5, 10, 42, 100,
256, 1024 and 3.14159 are written digit by digit. Café, naïve, façade, über, señor: words borrowed from
other languages keep their marks.
"""


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte value, as {byte: character}."""
    return {byte: char for char, byte in byte_level_alphabet().items()}


def train_merges(text: str, count: int) -> list[tuple[str, str]]:
    """Byte-pair merges that make ``count`` new tokens: most frequent first, ties broken by the pair itself.

    Two merges may spell the same token. Fewer tokens result if every word of the text has become one.
    """
    alphabet = byte_alphabet()
    pieces = Counter(re.findall(r" ?[^\W\d_]+|\d| ?[^\s\w]+|\s+", text))
    words = {tuple(alphabet[byte] for byte in piece.encode()): n for piece, n in pieces.items()}
    merges: list[tuple[str, str]] = []
    tokens: set[str] = set()
    while len(tokens) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += n
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None:
            break
        merges.append(best)
        tokens.add(best[0] + best[1])
        words = {_merge(word, best): n for word, n in words.items()}
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    i = 0
    while i < len(word):
        if word[i : i + 2] == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return tuple(out)


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Ids 0 to 2 are the special tokens, 3 to 258 the bytes, then merges up to ``vocab_size``."""
    alphabet = byte_alphabet()
    tokens = [*SPECIAL_TOKENS, *(alphabet[byte] for byte in range(256))]
    merges = train_merges(TRAINING_TEXT, vocab_size - len(tokens))
    distinct = dict.fromkeys([*tokens, *(left + right for left, right in merges)])
    vocab = {token: i for i, token in enumerate(distinct)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def tiny_tokenizer_config(max_length: int) -> dict[str, Any]:
    """The parsed tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
