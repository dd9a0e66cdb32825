"""GpuAvailableSensor through the real pynvml over a scripted stub library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm import GpuAvailableSensor
from airflow_provider_vllm.exceptions import InvalidInput
from tests.fakes.nvml import CRASHES, GIB, FakeGpu, NvmlStub

# The stub has to be in place before the process starts.
POKE = """
import json, sys
from airflow_provider_vllm import GpuAvailableSensor
try:
    print(json.dumps(GpuAvailableSensor(task_id="wait", **json.loads(sys.argv[1])).poke({})))
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    return NvmlStub.build(tmp_path_factory.mktemp("nvml"))


def poke(stub: NvmlStub | None, state_root: Path, **arguments: Any) -> Any:
    environ = {**os.environ, "AIRFLOW__VLLM__STATE_ROOT": str(state_root)}
    done = subprocess.run(
        [sys.executable, "-c", POKE, json.dumps(arguments)],
        env={**environ, **(stub.environ if stub else {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_enough_free_gpus(stub: NvmlStub, tmp_path: Path) -> None:
    stub.write(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    assert poke(stub, tmp_path / "vllm", count=2, min_free_gib=70) is True


def test_it_waits_for_memory(stub: NvmlStub, tmp_path: Path) -> None:
    stub.write(FakeGpu("GPU-a"), FakeGpu("GPU-b", used=30 * GIB, processes={1: 30 * GIB}))
    assert poke(stub, tmp_path / "vllm", count=2, min_free_gib=70) is False
    assert poke(stub, tmp_path / "vllm", count=1, min_free_gib=70) is True


def test_it_waits_for_a_gpu_that_a_server_of_ours_holds(stub: NvmlStub, tmp_path: Path) -> None:
    from airflow_provider_vllm.server import gpu_locks, gpus
    from airflow_provider_vllm.server.state import StateRoot

    stub.write(FakeGpu("GPU-a"))
    root = StateRoot(tmp_path / "vllm")
    listed = (gpus.Gpu("GPU-a", 0, "some GPU", 80 * GIB, 80 * GIB, 0),)
    claim = gpu_locks.claim(root.locks, listed, 1, owner="some-server")
    assert not isinstance(claim, gpus.Shortage)
    assert poke(stub, root.path) is False
    gpu_locks.release(claim.fds)
    assert poke(stub, root.path) is True


def test_a_worker_with_fewer_gpus_fails_at_once(stub: NvmlStub, tmp_path: Path) -> None:
    stub.write(FakeGpu("GPU-a"))
    assert poke(stub, tmp_path / "vllm", count=2).startswith("NoFreeGpu: ")


def test_a_worker_without_a_driver_fails_at_once_and_says_so(tmp_path: Path) -> None:
    said = poke(None, tmp_path / "vllm")
    assert said.startswith("NoFreeGpu: ")
    assert "libnvidia-ml" in said or "driver" in said


def test_a_driver_that_does_not_answer_is_not_taken_for_too_few_gpus(
    stub: NvmlStub, tmp_path: Path
) -> None:
    stub.write(FakeGpu("GPU-a"), init_result=CRASHES)
    said = poke(stub, tmp_path / "vllm")
    assert said.startswith("NoFreeGpu: 1 GPU(s) asked for, and none can be had: the process that")
    assert said.endswith("on this worker. Mend that, or send the task to another queue.")
    assert "what this host has" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        {"count": 0}, {"count": "1"}, {"count": None}, {"count": True},
        {"min_free_gib": -1}, {"min_free_gib": "20"}, {"min_free_gib": float("nan")},
    ],
)  # fmt: skip
def test_nonsense(arguments: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidInput, match=r"^GpuAvailableSensor .wait.: (count|min_free_gib) is .*: give a number"
    ):
        GpuAvailableSensor(task_id="wait", **arguments)


def test_it_gives_its_slot_back_by_default() -> None:
    assert GpuAvailableSensor(task_id="wait").reschedule
