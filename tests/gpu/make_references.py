"""Write the references that the GPU suite compares with: logits in float64, computed on a CPU, and the errors
of the CPU's bfloat16.

    python -m tests.gpu.make_references
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from interlock.demo.tiny import write_tiny
from interlock.reference.mimo_v2 import MiMoReference
from tests.gpu.engines import relative_errors, running
from tests.gpu.models import PROMPTS, REFERENCES, SPECS


def digest(folder: Path) -> str:
    """SHA-256 of the weights: a comparison with other weights would mean nothing."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def main() -> None:
    tensors, digests = {}, {}
    for name, spec in SPECS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            write_tiny(folder, spec)
            digests[name] = digest(folder)
            model = MiMoReference.load(folder)
            exact = [model.forward(prompt, dtype=torch.float64).float() for prompt in PROMPTS]
            tensors |= {f"{name}.{index}": logits for index, logits in enumerate(exact)}
            with running(folder, device="cpu", kernels="torch", dtype="bfloat16") as runner:
                tensors[f"{name}.bfloat16"] = relative_errors(runner, exact)
    save_file(tensors, REFERENCES, metadata=digests)


if __name__ == "__main__":
    main()
