"""Built-in models: "demo" (real weights behind real routing) and "tiny-random" (made from a seed)."""

from interlock.demo.origins import DemoOrigins
from interlock.demo.resolve import BUILT_IN_MODELS, dense_reference, resolve_model

__all__ = ["BUILT_IN_MODELS", "DemoOrigins", "dense_reference", "resolve_model"]
