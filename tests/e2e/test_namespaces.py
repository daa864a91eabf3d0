"""Two machines as two network namespaces, each with its own loopback and its own address on one cable."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.e2e.conftest import Answers
from tests.e2e.processes import BASE, READY, SERVE, answers, assert_same_answers, running

PORT, HTTP_PORT = 29500, 8000
ASK = """
import sys, httpx
kind = {"content-type": "application/json"}
answer = httpx.post(sys.argv[1], content=sys.argv[2], headers=kind, timeout=60)
print(answer.text)
"""


@dataclass(frozen=True)
class Machine:
    """One namespace."""

    namespace: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces joined by a veth pair; skips, with the reason, where they cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (package iproute2)")
    tag = secrets.token_hex(2)
    pair = tuple(Machine(f"interlock-{tag}-{i}", f"10.231.{int(tag[:2], 16)}.{i + 1}") for i in range(2))
    links = [f"il{tag}{i}" for i in range(2)]
    with ExitStack() as stack:
        try:
            for machine in pair:
                ip("netns", "add", machine.namespace)
                stack.callback(ip, "netns", "del", machine.namespace)
            first, second = (machine.namespace for machine in pair)
            ip(
                "link",
                "add",
                links[0],
                "netns",
                first,
                "type",
                "veth",
                "peer",
                "name",
                links[1],
                "netns",
                second,
            )
            for machine, link in zip(pair, links, strict=True):
                ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", link)
                ip("-n", machine.namespace, "link", "set", link, "up")
                ip("-n", machine.namespace, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield pair[0], pair[1]


def test_two_machines_answer_as_one_process(machines: tuple[Machine, Machine], one_process: Answers) -> None:
    """Collectives, messages and the store all go over the cable, whatever the host's own name resolves to."""
    flags = ("--tp-size", "2", "--moe-a2a-backend", "collective", "--nnodes", "2", "--stall-timeout", "10")
    where = ("--dist-init", f"{machines[0].address}:{PORT}", "--port", str(HTTP_PORT))
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                running([*SERVE, *BASE, *flags, *where, "--node-rank", str(rank)], prefix=machine.prefix)
            )
            for rank, machine in enumerate(machines)
        )
        url = first.wait_for(READY)[1]

        def ask(body: dict[str, object]) -> dict[str, object]:
            with running(
                ["-c", ASK, url + "/v1/completions", json.dumps(body)], prefix=machines[0].prefix
            ) as it:
                assert it.wait() == 0, it.text
                answer: dict[str, object] = json.loads(it.text)
                return answer

        assert_same_answers(answers(ask), one_process)
        second.signal(signal.SIGTERM)
        assert second.wait() == 0, second.text
        assert first.wait() == 0, first.text
