"""Where evidence files are: with the installation, and the user's own; writing and reading them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs

import interlock
from interlock.errors import InterlockError
from interlock.evidence.schema import SCHEMA, Evidence, arm_plan

SUFFIX = ".json"
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the ledger: its evidence, or why it cannot be read."""

    path: Path
    evidence: Evidence | None
    problem: str = ""


def installation_folder() -> Path:
    """Evidence that came with the package: inside it when installed, ``evidence/`` of a source tree."""
    package = Path(interlock.__file__).parent
    source_tree = package.parent.parent / "evidence"
    return source_tree if source_tree.is_dir() else package / "evidence" / "ledger"


def user_folder() -> Path:
    """Evidence of this user's own runs (``$XDG_DATA_HOME/interlock/evidence`` on Linux)."""
    return platformdirs.user_data_path("interlock") / "evidence"


def default_folders() -> tuple[Path, ...]:
    """Where evidence is looked for: what came with the package, then the user's own."""
    return installation_folder(), user_folder()


def write_evidence(evidence: Evidence, folder: Path | None = None, *, name: str | None = None) -> Path:
    """Seal ``evidence`` and write it; returns the file.

    Args:
        folder: the user's ledger by default.
        name: file name without ".json"; by default made of what was run, never one that exists.
    """
    folder = folder or user_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{SUFFIX}" if name else _free_path(folder, evidence)
    content = msgspec.json.encode(msgspec.to_builtins(evidence.sealed(), enc_hook=str))
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
    temporary.replace(path)
    return path


def read_evidence(path: Path) -> Evidence:
    """The evidence in ``path``.

    Raises:
        InterlockError: not readable, not evidence, or of another schema version.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InterlockError(f"{path}: larger than {MAX_BYTES >> 20} MiB, which no evidence file is")
        content = path.read_bytes()
        header = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("schema", msgspec.Raw(b"null"))
        schema = msgspec.json.decode(header)
        if schema != SCHEMA:
            raise InterlockError(f"{path}: schema is {schema!r}, this version reads {SCHEMA!r}")
        return msgspec.json.decode(content, type=Evidence)
    except OSError as error:
        raise InterlockError(f"{path}: cannot be read: {error}") from None
    except msgspec.DecodeError as error:
        raise InterlockError(f"{path}: is not an evidence file: {error}") from None


def entries(folders: Iterable[Path]) -> Iterator[Entry]:
    """Every ``*.json`` in ``folders`` (not in folders of them), by name; unreadable ones with the reason."""
    for folder in folders:
        for path in sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else ():
            try:
                yield Entry(path, read_evidence(path))
            except InterlockError as error:
                yield Entry(path, None, str(error))


def _free_path(folder: Path, evidence: Evidence) -> Path:
    stem = _stem(evidence)
    candidates = [folder / f"{stem}{SUFFIX}"]
    candidates += [folder / f"{stem}-{count}{SUFFIX}" for count in range(2, 10_000)]
    return next(path for path in candidates if not path.exists())


def _stem(evidence: Evidence) -> str:
    plan = arm_plan(evidence.arms[-1]) if evidence.arms else {}
    parts = [evidence.kind, evidence.model.name, evidence.device.key]
    if "moe_a2a_backend" in plan:
        parts.append(str(plan["moe_a2a_backend"]))
    elif evidence.arms and evidence.arms[-1].url:
        parts.append("url")
    if "ep_size" in plan:
        parts.append(f"ep{plan['ep_size']}")
    parts.append(evidence.created[:10])
    return "-".join(re.sub(r"[^a-z0-9.]+", "_", part.lower()).strip("_") for part in parts)
