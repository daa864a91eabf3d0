"""Text to token ids and back, and the chat template of a model folder."""

from interlock.tokenizer.detokenizer import Detokenizer
from interlock.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]
