"""Models of other packages that build something else than the plan says: none of them gets to "ready"."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.installed import fake_install
from tests.e2e.mutants.interlock_mutants import MUTANTS
from tests.e2e.processes import BASE, READY, Process, environment, running
from tests.tiny import flash, tiny_folder

HERE = Path(__file__).parent
TWO_RANKS = ("--tp-size", "2", "--moe-a2a-backend", "collective", "--moe-decode-capacity", "32")
EXPECTED = {
    "Forgetful": (
        "--moe-a2a-backend: the plan says prefill dispatches = at least 1 call, "
        "but rank 0, layer 1 observed 0"
    ),
    "SmallerCapacity": (
        "--moe-decode-capacity: the plan says moe_decode_capacity = 32, but rank 1, layer 1 observed 31"
    ),
    "SwappedRunner": (
        "--moe-runner-backend: the plan says moe_runner_backend = cpu, but rank 0, layer 1 observed torch"
    ),
    "NoExperts": (
        "--moe-a2a-backend: the plan says moe_a2a_backend = collective, "
        "and rank 0, layer 6 shows no receipt for it"
    ),
    "SkipsALayer": (
        "--moe-a2a-backend: the plan says prefill dispatches = at least 1 call, "
        "but rank 0, layer 6 observed 0"
    ),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on PYTHONPATH in which the mutants are installed."""
    target = tmp_path_factory.mktemp("site")
    shutil.copytree(HERE / "mutants" / "interlock_mutants", target / "interlock_mutants")
    shutil.copytree(
        HERE.parent / "conformance" / "forgetful" / "interlock_forgetful", target / "interlock_forgetful"
    )
    entries = {name.lower(): f"interlock_mutants:{name}" for name in MUTANTS}
    entries["forgetful"] = "interlock_forgetful:FAMILY"
    return fake_install(target, "interlock_mutants", "interlock.models", entries)


@contextmanager
def serving_mutant(site: Path, folder: Path, mutant: str, *flags: str) -> Iterator[Process]:
    """``interlock serve`` of a checkpoint that names the mutant's architecture."""
    shutil.copytree(tiny_folder(flash()), folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [f"{mutant}ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(site), env["PYTHONPATH"]])
    arguments = ("-m", "interlock", "serve", str(folder), *BASE, "--port", "0", *TWO_RANKS, *flags)
    with running(arguments, env=env) as process:
        yield process


@pytest.mark.parametrize("mutant", EXPECTED)
def test_a_server_that_does_not_do_what_was_asked_never_says_ready(
    site: Path, tmp_path: Path, mutant: str
) -> None:
    """A01: what an option asks for must be seen on every layer of every rank, or there is no server."""
    with serving_mutant(site, tmp_path / "model", mutant) as process:
        assert process.wait(120) == 1, process.text
    assert EXPECTED[mutant] in process.text
    assert "ready:" not in process.text
    assert "Traceback" not in process.text


def test_a_rank_that_loads_for_longer_than_the_stall_timeout_is_waited_for(
    site: Path, tmp_path: Path
) -> None:
    with serving_mutant(site, tmp_path / "model", "SlowToLoad", "--stall-timeout", "3") as process:
        process.wait_for(READY)
