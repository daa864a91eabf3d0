"""Backends, runners and models of other packages: found, checked, and never trusted unseen."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conformance.installed import ROOT, fake_install, pip_install, run_python
from tests.tiny import flash, tiny_folder


@pytest.fixture(scope="module")
def gather(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``examples/plugin_backend`` installed in a folder of its own."""
    if find_spec("hatchling") is None:
        pytest.skip("building the example package needs hatchling (pip install hatchling)")
    source = tmp_path_factory.mktemp("source") / "plugin_backend"
    shutil.copytree(ROOT / "examples" / "plugin_backend", source)
    return pip_install(source, tmp_path_factory.mktemp("site"))


def test_an_installed_backend_is_known_and_passes_the_suite(gather: Path) -> None:
    """A complete third-party backend: no file of this project names it, and the suite runs against it."""
    done = run_python(
        "import sys; from interlock.cli import run; sys.exit(run(sys.argv[1:]))",
        gather,
        arguments=("conformance", "gather", "--ranks", "2", "--cases", "60"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a2a backend gather: passed" in done.stdout


def test_an_installed_backend_is_planned_without_torch(gather: Path) -> None:
    code = (
        "import sys; from interlock.moe.a2a.registry import a2a_backends; c = a2a_backends();"
        "assert 'torch' not in sys.modules; print(c.get('gather').dispatcher, dict(c.broken))"
    )
    done = run_python(code, gather)
    assert done.stdout.strip() == "interlock_gather.dispatcher:Gather {}", done.stderr


def test_a_server_runs_on_an_installed_backend(gather: Path) -> None:
    """Two ranks answer as one does, and every layer's receipt names the installed dispatcher."""
    code = """
import sys
from interlock import LLM, SamplingParams
if __name__ == "__main__":
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    base = dict(dtype="float32", threads=1, max_model_len=128, kv_memory="64MiB")
    answers = []
    for mode in (dict(), dict(tp_size=2, moe_a2a_backend="gather")):
        with LLM(sys.argv[1], **base, **mode) as llm:
            answers.append(llm.generate([[9, 8, 7, 6, 5]], greedy)[0].token_ids)
    layers = [layer for items in llm.receipts.values() for layer in items["moe_layers"]]
    assert answers[0] == answers[1], answers
    print({layer["dispatcher"] for layer in layers}, len(llm.receipts))
"""
    done = run_python(code, gather, arguments=(str(tiny_folder(flash())),))
    assert done.stdout.strip().endswith("{'interlock_gather.dispatcher:Gather'} 2"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("module_that_is_missing:BACKEND", "ModuleNotFoundError: No module named 'module_that_is_missing'"),
        ("interlock.moe.a2a.none:ABSENT", "AttributeError"),
        ("interlock.moe.terms:Phase", "is EnumType, not A2ABackend"),
        ("interlock.moe.a2a.collective:BACKEND", "takes the name 'collective', which exists already"),
    ],
)
def test_a_broken_plugin_is_reported_and_hurts_nobody(tmp_path: Path, value: str, reason: str) -> None:
    """A registered backend that cannot be used is listed with the reason; the others work."""
    fake_install(tmp_path, "odd", "interlock.a2a_backends", {"odd": value})
    code = """
from interlock.errors import InterlockError
from interlock.moe.a2a.registry import BUILT_IN, a2a_backends
catalogue = a2a_backends()
assert len(catalogue.entries) == len(BUILT_IN) and "odd" not in catalogue.entries
assert catalogue.get("collective").dispatcher == "interlock.moe.a2a.collective.dispatcher:Collective"
try:
    catalogue.get("odd")
except InterlockError as error:
    print(error)
"""
    done = run_python(code, tmp_path)
    assert done.stdout.startswith("a2a backend 'odd' is registered but broken: "), done.stderr
    assert reason in done.stdout


@pytest.fixture
def forgetful(tmp_path: Path) -> tuple[Path, Path]:
    """(where the mutant family is installed, a checkpoint that names it)."""
    site = tmp_path / "site"
    shutil.copytree(Path(__file__).parent / "forgetful", site)
    fake_install(site, "interlock_forgetful", "interlock.models", {"forgetful": "interlock_forgetful:FAMILY"})
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(flash()), folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["ForgetfulForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return site, folder


@pytest.mark.parametrize("mode", [("--tp-size", "1"), ("--tp-size", "2", "--moe-a2a-backend", "collective")])
def test_a_model_that_forgets_its_dispatcher_does_not_start(
    forgetful: tuple[Path, Path], mode: tuple[str, ...]
) -> None:
    """A01: the answers may be right; what was asked for was not seen working, so there is no server."""
    site, folder = forgetful
    done = run_python(
        "import sys; from interlock.cli import run\nif __name__ == '__main__': sys.exit(run(sys.argv[1:]))",
        site,
        arguments=(
            *("generate", str(folder), "--prompt", "a", "--max-tokens", "1", "--dtype", "float32"),
            *("--max-model-len", "128", "--kv-memory", "64MiB", *mode),
        ),
    )
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    assert "--moe-a2a-backend" in done.stderr
    assert "no receipt" in done.stderr or "observed 0" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
