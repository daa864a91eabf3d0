"""Does a checkpoint hold exactly what the model expects? Decided from headers, before any weight is read."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from interlock.checkpoint.fp8_names import SCALE_SUFFIX, scale_rows
from interlock.checkpoint.index import FolderIndex, StoredTensor, raise_problems
from interlock.checkpoint.qkv import detect_layout
from interlock.checkpoint.specs import TensorSpec
from interlock.errors import CheckpointError
from interlock.plan.card import ModelCard

PLAIN_DTYPES = ("F32", "BF16", "F16")
SCALE_DTYPES = ("F32", "BF16")
FP8_DTYPE = "F8_E4M3"


@dataclass(slots=True)
class LoadReport:
    """What was found while opening and loading a checkpoint.

    Attributes:
        qkv_layout: "split", "plain" or "chunked".
        quantised: number of tensors stored as fp8.
        skipped: tensors that do not belong to the text model, counted by their prefix.
        unlisted: tensors in the files that the index does not list.
        warnings: sentences for the log.
    """

    qkv_layout: str = "split"
    quantised: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    unlisted: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)


def validate(
    index: FolderIndex,
    specs: Sequence[TensorSpec],
    *,
    card: ModelCard,
    skipped_prefixes: Sequence[str],
    qkv_layout: str,
) -> LoadReport:
    """Check names, shapes and dtypes of every tensor.

    Raises:
        CheckpointError: lists the first problems and how many there are: missing, unexpected, mis-shaped,
            wrongly typed tensors, fp8 weights without scales, scales without fp8 weights.
    """
    problems: list[str] = []
    stored = index.tensors
    layout = "split"
    if card.fused_qkv:
        try:
            layout = detect_layout(specs, stored, block_rows=card.weight_block[0], requested=qkv_layout)
        except CheckpointError as error:
            problems.append(str(error))
    expected: set[str] = set()
    for spec in specs:
        expected.add(spec.name)
        problems += _check_tensor(spec, stored, card)
        if spec.quantisable and (spec.name + SCALE_SUFFIX) in stored:
            expected.add(spec.name + SCALE_SUFFIX)
            chunks = max(1, spec.fused_groups) if layout == "chunked" else 1
            problems += _check_scale(spec, stored, card.weight_block, chunks)
    strange = [name for name in stored if name not in expected]
    skipped = Counter(prefix for name in strange for prefix in skipped_prefixes if name.startswith(prefix))
    unexpected = [name for name in strange if not name.startswith(tuple(skipped_prefixes))]
    problems += _describe_unexpected(unexpected, expected - stored.keys())
    problems += [
        f"tensor {name!r} is needed and lies in a file, but the index does not list it"
        for name in index.unlisted
        if name in expected and name not in stored
    ]
    raise_problems(index.folder, problems)
    report = LoadReport(qkv_layout=layout, skipped=dict(skipped), unlisted=index.unlisted)
    report.quantised = sum(stored[spec.name].dtype == FP8_DTYPE for spec in specs if spec.name in stored)
    if index.unlisted:
        report.warnings.append(
            f"{len(index.unlisted)} tensors are not in the index and were ignored ({index.unlisted[0]}, ...)"
        )
    return report


def _check_tensor(spec: TensorSpec, stored: Mapping[str, StoredTensor], card: ModelCard) -> Iterable[str]:
    found = stored.get(spec.name)
    if found is None:
        if not spec.optional:
            yield f"tensor {spec.name!r} is missing"
        return
    if found.shape != spec.shape:
        yield f"tensor {spec.name!r} has shape {list(found.shape)}; expected {list(spec.shape)}"
    scaled = spec.name + SCALE_SUFFIX in stored
    if found.dtype == FP8_DTYPE and spec.quantisable:
        if card.weight_format != "fp8_block":
            yield f"tensor {spec.name!r} is {FP8_DTYPE}, but config.json has no fp8 quantization_config"
        elif not scaled:
            yield f"tensor {spec.name!r} is {FP8_DTYPE} and its scale {spec.name + SCALE_SUFFIX!r} is missing"
    elif found.dtype not in PLAIN_DTYPES:
        allowed = (*PLAIN_DTYPES, FP8_DTYPE) if spec.quantisable else PLAIN_DTYPES
        yield f"tensor {spec.name!r} has dtype {found.dtype}; supported here: {', '.join(allowed)}"
    elif scaled:
        yield f"tensor {spec.name!r} is {found.dtype}, yet it has a scale {spec.name + SCALE_SUFFIX!r}"


def _check_scale(
    spec: TensorSpec, stored: Mapping[str, StoredTensor], block: tuple[int, int], chunks: int
) -> Iterable[str]:
    scale = stored[spec.name + SCALE_SUFFIX]
    grid = (scale_rows(spec.shape[0], block[0], chunks), scale_rows(spec.shape[1], block[1]))
    if scale.shape != grid:
        yield (
            f"scale {scale.name!r} has shape {list(scale.shape)}; expected {list(grid)} for "
            f"{list(spec.shape)} in blocks of {block[0]}x{block[1]}"
        )
    if scale.dtype not in SCALE_DTYPES:
        yield f"scale {scale.name!r} has dtype {scale.dtype}; supported: {', '.join(SCALE_DTYPES)}"


def _describe_unexpected(unexpected: list[str], missing: set[str]) -> Iterable[str]:
    candidates = sorted(missing)[:1000]
    for number, name in enumerate(unexpected):
        text = f"tensor {name!r} is unexpected"
        if "scale" in name.rsplit(".", 1)[-1]:
            text += f" (block scales are read from '<weight>{SCALE_SUFFIX}' only)"
        elif number < 10 and (near := difflib.get_close_matches(name, candidates, n=1, cutoff=0.9)):
            text += f" (missing is {near[0]!r})"
        yield text
