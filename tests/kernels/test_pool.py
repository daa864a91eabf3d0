"""The thread pool under the native kernels."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kernels.cases import cpu, normal, same_bits


def test_more_threads_than_cores_and_changing_numbers() -> None:
    packed, x = cpu().pack_linear(normal(600, 300, seed=1)), normal(20, 300)
    expected = cpu().linear(x, packed)
    for threads in (2, 16, 3, 1, 8):
        assert same_bits(cpu(threads).linear(x, packed), expected)


def test_workers_that_fell_asleep_wake_up() -> None:
    packed, x = cpu().pack_linear(normal(600, 300, seed=1)), normal(4, 300)
    expected = cpu().linear(x, packed)
    for _ in range(5):
        time.sleep(0.01)
        assert same_bits(cpu(3).linear(x, packed), expected)


def test_callers_on_several_python_threads() -> None:
    packed = cpu().pack_linear(normal(600, 300, seed=1))
    inputs = [normal(5, 300, seed=seed) for seed in range(40)]
    expected = [cpu().linear(x, packed) for x in inputs]
    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(lambda x: cpu(2).linear(x, packed), inputs))
    assert all(same_bits(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has threads")
def test_a_forked_child_has_workers_of_its_own() -> None:
    code = """
import os, warnings, torch
from interlock.kernels.registry import get_kernels
warnings.simplefilter("ignore")
torch.set_num_threads(1)
kernels = get_kernels("cpu", threads=2)
packed, x = kernels.pack_linear(torch.ones(600, 300)), torch.ones(4, 300)
kernels.linear(x, packed)
child = os.fork()
if child == 0:
    os._exit(0 if (kernels.linear(x, packed) == 300).all() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "0"
