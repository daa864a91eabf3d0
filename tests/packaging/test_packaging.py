"""Files for Docker, Kubernetes, systemd and Grafana name what exists, and agree with each other."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from interlock.engine.same_launch import OWN
from interlock.option_sources import gather
from interlock.options import OPTIONS, Options
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.resolve import resolve
from interlock.server.metrics import METRIC_NAMES
from tests.plan.machines import gpu_machine, mimo_pro_card

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
SUFFIXES = ("_total", "_bucket", "_sum", "_count", "")


def options_of(arguments: list[str]) -> Options:
    """Options of a command line: a model and ``--flag=value`` or ``--flag value``."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    flags: dict[str, str | bool | None] = {}
    while words:
        word = words.pop(0)
        flags[word[2:].replace("-", "_") if word.startswith("--") else "model"] = (
            words.pop(0) if word.startswith("--") else word
        )
    assert flags.keys() <= OPTIONS.keys() | {"config"}
    config = flags.pop("config", None)
    assert config is None or isinstance(config, str)
    return gather(flags, config=None, environ={})


# ---- Grafana


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PACKAGING / "grafana" / "interlock.json").read_text(encoding="utf-8"))
    return found


def test_the_dashboard_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "grafana_dashboard.py"))["text"]()
    assert (PACKAGING / "grafana" / "interlock.json").read_text(encoding="utf-8") == made


def metrics_in(expression: str) -> Iterator[str]:
    """Names of the exposition's families that a PromQL expression asks for."""
    for name in re.findall(r"interlock:\w+", expression):
        yield next((name.removesuffix(s) for s in SUFFIXES if name.removesuffix(s) in METRIC_NAMES), name)


def test_every_expression_asks_for_metrics_that_exist(dashboard: dict[str, Any]) -> None:
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [variable["query"] for variable in dashboard["templating"]["list"]]
    assert len(expressions) > 30
    asked = {name for expression in expressions for name in metrics_in(expression)}
    assert asked <= METRIC_NAMES
    for expression in expressions:
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")


def test_panels_do_not_overlap_and_have_ids_of_their_own(dashboard: dict[str, Any]) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells
        assert place["x"] + place["w"] <= 24
        cells |= own
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


# ---- Kubernetes


def pods() -> dict[str, Any]:
    group, service = yaml.safe_load_all(
        (PACKAGING / "kubernetes" / "leaderworkerset.yaml").read_text(encoding="utf-8")
    )
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    return {name: template[f"{name}Template"]["spec"] for name in ("leader", "worker")}


def plan_of(pod: Any, node: int) -> LaunchPlan:
    (container,) = pod["containers"]
    assert container["command"][-2:] == ["interlock", "serve"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    filled = {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": str(node),
        "LWS_LEADER_ADDRESS": "interlock-0.interlock",
    }
    arguments = [re.sub(r"\$\((\w+)\)", lambda m: filled[m[1]], text) for text in container["args"]]
    return resolve(options_of(arguments), mimo_pro_card(), gpu_machine(8, memory=1 << 40))


def test_the_group_of_pods_is_one_launch() -> None:
    """Both pods plan the same thing, as the engine would check."""
    found = pods()
    leader, worker = plan_of(found["leader"], 0), plan_of(found["worker"], 1)
    assert (leader.tp_size, leader.nnodes, leader.device) == (16, 2, "cuda")
    assert (leader.node_rank, worker.node_rank) == (0, 1)
    for item in set(LaunchPlan.__struct_fields__) - OWN:
        assert getattr(leader, item) == getattr(worker, item), item


def test_probes_and_grace_fit_the_server() -> None:
    found = pods()
    (leader,) = found["leader"]["containers"]
    assert leader["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert (
        leader["livenessProbe"]["httpGet"]["path"] == leader["startupProbe"]["httpGet"]["path"] == "/health"
    )
    drain = plan_of(found["leader"], 0).drain_timeout
    for pod in found.values():
        assert pod["terminationGracePeriodSeconds"] > drain
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= {v["name"] for v in pod["volumes"]}


# ---- systemd and Docker


def test_the_unit_starts_an_existing_command_and_waits_for_it_to_drain() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(PACKAGING / "systemd" / "interlock.service", encoding="utf-8")
    service = unit["Service"]
    command = service["ExecStart"].split()
    assert command[:2] == ["/opt/interlock/bin/interlock", "serve"]
    options_of(command[2:])
    assert float(service["TimeoutStopSec"]) > Options.of().number("drain_timeout")
    assert service["RestartPreventExitStatus"] == "2"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_docker_files_copy_what_exists_and_set_what_is_an_option(kind: str) -> None:
    text = (PACKAGING / "docker" / f"Dockerfile.{kind}").read_text(encoding="utf-8")
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for *sources, _ in (line.split()[1:] for line in re.findall(r"^COPY (?!--from).*", text, re.MULTILINE)):
        for source in sources:
            assert (ROOT / source).exists()
            assert source in kept
    for name in re.findall(r"INTERLOCK_[A-Z_]+", text):
        assert name.removeprefix("INTERLOCK_").lower() in OPTIONS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = [need for need in project["dependencies"] if need.startswith("torch")]
    assert f'"{torch}"' in text
    extra = re.search(r'"/src\[(\w+)\]"', text)
    assert extra is not None
    assert extra[1] in project["optional-dependencies"]
    assert re.search(r"^USER interlock$", text, re.MULTILINE)
    assert "HEALTHCHECK" in text
