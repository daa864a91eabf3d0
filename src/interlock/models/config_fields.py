"""Typed reading of a config.json: missing, misspelt and mistyped keys are refused by name."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from interlock.errors import CheckpointError

# How other families (or older files) spell the same thing; used only to say "did you mean".
OTHER_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_experts_per_tok": ("moe_topk", "moe_k", "top_k", "moe_top_k", "num_experts_per_token"),
    "n_routed_experts": ("num_experts", "num_local_experts", "moe_num_experts"),
    "num_experts": ("n_routed_experts", "moe_num_experts"),
    "moe_intermediate_size": ("expert_ffn_hidden_size", "ffn_hidden_size", "expert_intermediate_size"),
    "num_hidden_layers": ("num_layers", "n_layers"),
    "norm_topk_prob": ("moe_renormalize", "renormalize"),
    "layernorm_epsilon": ("layer_norm_epsilon", "layer_norm_eps"),
    "hybrid_layer_pattern": ("hybrid_pattern", "sliding_window_pattern"),
    "moe_layer_freq": ("first_k_dense_replace",),
    "rope_theta": ("rotary_base", "rope_base"),
    "partial_rotary_factor": ("rotary_dim", "rope_dim", "rotary_pct"),
    "dtype": ("params_dtype",),
}
TYPO_SIMILARITY = 0.85
_MISSING = object()


class ConfigFields:
    """A parsed config.json with typed access. ``null`` counts as absent.

    Args:
        config: the parsed file.
        required: keys that must be there; an entry "a|b" is met by either spelling.
        optional: keys the family reads when they are there. A key of the file that is unknown and nearly
            equal to an absent one of these is taken for a typo.

    Raises:
        CheckpointError: names every missing key, with near misses found in the file.
    """

    def __init__(
        self, config: Mapping[str, Any], *, required: Iterable[str], optional: Iterable[str] = ()
    ) -> None:
        self._config = config
        required, optional = tuple(required), tuple(optional)
        known = {name for entry in (*required, *optional) for name in entry.split("|")}
        self._strange = [key for key in config if key not in known]
        problems = [self._describe_missing(entry) for entry in required if not self._present(entry)]
        problems += self._typos(optional)
        if problems:
            raise CheckpointError("config.json: " + "; ".join(problems))

    def _present(self, entry: str) -> bool:
        return any(self._config.get(name) is not None for name in entry.split("|"))

    def _describe_missing(self, entry: str) -> str:
        names = entry.split("|")
        near = [key for name in names for key in OTHER_SPELLINGS.get(name, ()) if key in self._config]
        near += [
            key for name in names for key in difflib.get_close_matches(name, self._strange, n=2, cutoff=0.75)
        ]
        text = f"required key {' or '.join(map(repr, names))} is missing"
        if near:
            found = ", ".join(f"{key} = {self._config[key]!r}" for key in dict.fromkeys(near))
            text += f" (the file has {found}; rename it if that is what it means)"
        return text

    def _typos(self, optional: tuple[str, ...]) -> list[str]:
        absent = [name for entry in optional for name in entry.split("|") if name not in self._config]
        found = []
        for key in self._strange:
            match = difflib.get_close_matches(key, absent, n=1, cutoff=TYPO_SIMILARITY)
            if match:
                found.append(f"unknown key {key!r}: did you mean {match[0]!r}?")
        return found

    def has(self, key: str) -> bool:
        return self._config.get(key) is not None

    def _get(self, key: str, default: object) -> Any:
        value = self._config.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise CheckpointError(f"config.json: {self._describe_missing(key)}")
        return default

    def integer(self, key: str, default: Any = _MISSING, *, minimum: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise CheckpointError(f"config.json: {key} is {value!r}; expected an integer >= {minimum}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"config.json: {key} is {value!r}; expected a positive number")
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} is {value!r}; expected true or false")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"config.json: {key} is {value!r}; expected a string")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {key} is {value!r}; expected an object")
        return value

    def sequence(self, key: str, length: int) -> list[Any]:
        value = self._get(key, _MISSING)
        if not isinstance(value, list) or len(value) != length:
            size = f" of {len(value)}" if isinstance(value, list) else ""
            raise CheckpointError(
                f"config.json: {key} is a {type(value).__name__}{size}; "
                f"expected a list of num_hidden_layers = {length}"
            )
        return value

    def choice(self, key: str, allowed: Mapping[Any, Any] | Iterable[Any], default: Any = _MISSING) -> Any:
        """The value of ``key`` when it is one of ``allowed`` (mapped, when that is a mapping)."""
        value = self._get(key, default)
        options = list(allowed)
        if value not in options:
            supported = ", ".join(map(repr, options))
            raise CheckpointError(f"config.json: {key} = {value!r} is not supported; supported: {supported}")
        return allowed[value] if isinstance(allowed, Mapping) else value

    def dtype(self) -> str:
        """The checkpoint's own dtype, from ``dtype`` or the older ``torch_dtype``."""
        key = "dtype" if self.has("dtype") else "torch_dtype"
        return str(self.choice(key, ("float32", "bfloat16")))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids, or null."""
        value = self._config.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise CheckpointError(f"config.json: {key} is {value!r}; expected token ids")
        return tuple(ids)

    def token_id(self, key: str) -> int | None:
        ids = self.token_ids(key)
        return ids[0] if ids else None


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of the config with sorted keys and no spaces."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def rope_parameters(parameters: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Refuse any rope scaling: only the plain (``default``) kind is implemented."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise CheckpointError(
            f"config.json: rope scaling {kind!r} in {where} is not supported; supported: 'default' (none)"
        )
    return parameters


def fp8_block(fields: ConfigFields) -> tuple[int, int] | None:
    """Block shape of an fp8 e4m3 block-quantised checkpoint, None when there is no quantisation.

    Raises:
        CheckpointError: any other quantisation, by name (e.g. ``store_dtype`` mxfp4).
    """
    if not fields.has("quantization_config"):
        return None
    quantisation = fields.mapping("quantization_config")
    allowed: dict[str, tuple[Any, ...]] = {
        "quant_method": ("fp8",),
        "store_dtype": ("fp8", None),
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic", None),
    }
    for key, values in allowed.items():
        if quantisation.get(key) not in values:
            raise CheckpointError(
                f"config.json: quantization_config.{key} = {quantisation.get(key)!r} is not supported; "
                f"supported: {values[0]!r} (e4m3 weights with float32 scales for blocks)"
            )
    block = quantisation.get("weight_block_size", [128, 128])
    if not isinstance(block, list) or len(block) != 2 or any(not isinstance(b, int) or b < 1 for b in block):
        raise CheckpointError(
            f"config.json: quantization_config.weight_block_size = {block!r} is not supported; expected two "
            "sizes such as [128, 128]"
        )
    return block[0], block[1]


def fp8_exceptions(fields: ConfigFields) -> tuple[str, ...]:
    """Modules of the layers that are not quantised, by their last name: ``("o_proj",)`` of MiMo-V2.

    Read from ``ignored_layers`` or ``modules_to_not_convert``, whichever the checkpoint's maker wrote.
    """
    if not fields.has("quantization_config"):
        return ()
    quantisation = fields.mapping("quantization_config")
    listed = quantisation.get("ignored_layers") or quantisation.get("modules_to_not_convert") or []
    if not isinstance(listed, list) or any(not isinstance(name, str) for name in listed):
        raise CheckpointError(
            f"config.json: quantization_config lists modules that are not quantised as {listed!r}; "
            "expected a list of names"
        )
    return tuple(sorted({name.rpartition(".")[2] for name in listed if ".layers." in name}))
