"""NCCL libraries of this machine, found without loading any: torch's own, those of other wheels on the search
path, and what is mapped into this process already (``LD_PRELOAD``)."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import msgspec

LIBRARY: Final = Path("nvidia/nccl/lib/libnccl.so.2")
"""Where a wheel of NVIDIA's keeps it, beside ``nvidia/nccl/include/nccl.h``."""
WHEELS: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
MAPS: Final = Path("/proc/self/maps")
_NUMBERS: Final = re.compile(r"^#define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", re.MULTILINE)


class NcclLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """One ``libnccl``. ``version`` such as "2.30.7", "" where nothing beside the file tells it; ``of_torch``:
    torch takes this one when nothing is preloaded."""

    path: str
    version: str
    of_torch: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        return version_numbers(self.version)


def version_numbers(version: str) -> tuple[int, ...]:
    """``"2.30.7"`` -> ``(2, 30, 7)``; ``()`` for "" and for what is no version."""
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


def nccl_libraries(search_path: Iterable[str] | None = None) -> tuple[NcclLibrary, ...]:
    """Libraries in the order in which a process would prefer them: mapped ones, torch's own, other wheels'.

    Args:
        search_path: folders of packages; by default those of this interpreter.
    """
    folders = [Path(entry or ".") for entry in (sys.path if search_path is None else search_path)]
    own = _torch_folder()
    own_path = (own / LIBRARY).resolve() if own else None
    paths = [*mapped_nccl(), *([own_path] if own_path else [])]
    paths += [(folder / LIBRARY).resolve() for folder in folders]
    return tuple(
        NcclLibrary(path=str(path), version=next(_versions(path), ""), of_torch=path == own_path)
        for path in dict.fromkeys(paths)
        if path.is_file()
    )


def mapped_nccl() -> tuple[Path, ...]:
    """Files called libnccl that are mapped into this process, each once."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    paths = (line.split(maxsplit=5)[5] for line in lines if "/libnccl.so" in line)
    return tuple(dict.fromkeys(map(Path, paths)))


def loaded_version() -> tuple[int, ...]:
    """What the mapped library says of itself, such as (2, 30, 7); () where none is mapped.

    ``torch.cuda.nccl.version()`` is no substitute: it states the headers that torch was compiled with.
    """
    for path in mapped_nccl():
        number = ctypes.c_int()
        if ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number)) == 0:
            return number.value // 10000, number.value // 100 % 100, number.value % 100
    return ()


def _torch_folder() -> Path | None:
    """The folder that torch is installed in; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))).parent if places else None


def _versions(path: Path) -> Iterator[str]:
    """What the header beside the library, its wheel and its own name say."""
    header = path.parents[1] / "include" / "nccl.h"
    if header.is_file():
        numbers = dict(_NUMBERS.findall(header.read_text(encoding="utf-8", errors="replace")))
        if len(numbers) == 3:
            yield f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}"
    if path.match(str(LIBRARY)):
        for name in WHEELS:
            yield from (found.version for found in distributions(name=name, path=[str(path.parents[3])]))
    suffix = path.name.partition(".so.")[2]
    if suffix.count(".") == 2:
        yield suffix
