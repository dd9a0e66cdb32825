"""GPUs read through the real pynvml over a scripted stub library, also where the driver hangs or breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.server import gpus, launch, nvml, postmortem, remains, supervisor
from airflow_provider_vllm.server.state import GenerationDir, ServerState
from tests.fakes.nvml import CRASHES, HANGS, FakeGpu, FakeMig, NvmlStub

GIB = 1024**3

# Evaluates one expression a line, so that one process can see its GPUs change.
ASK = """
import dataclasses, json, sys
from airflow_provider_vllm.server import gpus
for line in sys.stdin:
    print(json.dumps(eval(line), default=dataclasses.asdict), flush=True)
"""


class Asker:
    """A process of its own whose NVML is the stub."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ASK],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, expression: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=10)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    return NvmlStub.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(library: NvmlStub) -> NvmlStub:
    library.write()
    return library


@pytest.fixture
def ask(stub: NvmlStub) -> Iterator[Asker]:
    asker = Asker(stub.environ)
    yield asker
    asker.close()


def test_reads_name_memory_processes_and_capability(stub: NvmlStub, ask: Asker) -> None:
    stub.write(
        FakeGpu("GPU-a", reserved=GIB, used=3 * GIB, processes={4711: 2 * GIB, 4712: GIB}),
        FakeGpu("GPU-b", name="NVIDIA L4", total=24 * GIB, capability=(8, 9)),
    )
    first, second = ask("gpus.list_gpus()")
    assert first == {
        "uuid": "GPU-a",
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "total_bytes": 79 * GIB,  # without the driver's reserve
        "free_bytes": 76 * GIB,
        "used_bytes": 3 * GIB,
        "processes": [
            {"pid": 4711, "used_bytes": 2 * GIB},
            {"pid": 4712, "used_bytes": GIB},
        ],
        "compute_capability": [9, 0],
        "parent_uuid": None,
    }
    assert (second["name"], second["index"], second["compute_capability"]) == (
        "NVIDIA L4",
        1,
        [8, 9],
    )
    assert ask("gpus.driver_present()") is True
    assert (
        ask("gpus.driver_status()")
        == "NVIDIA driver 580.95.05, CUDA 13.0, 2 GPU(s) or MIG device(s)"
    )


def test_a_gpu_in_mig_mode_is_listed_as_its_mig_devices(stub: NvmlStub, ask: Asker) -> None:
    migs = (FakeMig("MIG-1", place=0), FakeMig("MIG-2", place=5, processes={9: GIB}, used=GIB))
    stub.write(FakeGpu("GPU-a", mig=migs), FakeGpu("GPU-b", mig=()), FakeGpu("GPU-c"))
    found = ask("gpus.list_gpus()")
    assert [(gpu["uuid"], gpu["parent_uuid"]) for gpu in found] == [
        ("MIG-1", "GPU-a"),
        ("MIG-2", "GPU-a"),
        ("GPU-c", None),
    ]
    assert "GPU 1 is in MIG mode and has no MIG device" in ask("gpus.driver_status()")
    assert found[1]["processes"] == [{"pid": 9, "used_bytes": GIB}]
    assert (found[1]["total_bytes"], found[1]["free_bytes"]) == (20 * GIB, 19 * GIB)
    assert found[1]["compute_capability"] == [9, 0]


def test_one_process_sees_memory_and_devices_change(stub: NvmlStub, ask: Asker) -> None:
    seen = []
    for used in (0, 60 * GIB, 0):
        stub.write(FakeGpu("GPU-a", used=used, processes={7: used} if used else {}))
        (gpu,) = ask("gpus.list_gpus()")
        seen.append((gpu["free_bytes"] // GIB, len(gpu["processes"])))
    assert seen == [(80, 0), (20, 1), (80, 0)]
    stub.write()
    assert ask("gpus.list_gpus()") == []
    assert ask("gpus.driver_status()") == "the NVIDIA driver lists no GPU"


def test_a_lost_gpu_hides_only_itself(stub: NvmlStub, ask: Asker) -> None:
    stub.write(FakeGpu("GPU-a", result=15), FakeGpu("GPU-b"))
    assert [gpu["uuid"] for gpu in ask("gpus.list_gpus()")] == ["GPU-b"]
    assert "GPU 0 cannot be read: GPU is lost" in ask("gpus.driver_status()")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (9, "kernel driver is not loaded"),
        (18, "differ in version; restart this worker's host"),
        (999, "does not answer: Unknown Error"),
    ],
)
def test_a_driver_that_does_not_start_is_named(
    stub: NvmlStub, ask: Asker, code: int, why: str
) -> None:
    stub.write(FakeGpu("GPU-a"), init_result=code)
    assert ask("gpus.list_gpus()") == []
    assert ask("gpus.driver_present()") is False
    assert why in ask("gpus.driver_status()")


def test_a_wedged_driver_holds_nothing_up(stub: NvmlStub, ask: Asker) -> None:
    """One process is left with it, and no second one while the first is there."""
    stub.write(FakeGpu("GPU-a"), init_result=HANGS)
    assert ask("gpus.list_gpus(timeout=1.0)") == []
    pid = ask("gpus.nvml._asker.pid")
    said = ask("gpus.driver_status()")
    assert said.startswith("the NVIDIA driver does not answer (")
    assert "dmesg" in said
    assert ask("gpus.driver_present()") is True, "a server is not sent to the CPU for it"
    ask("gpus.nvml._asker.wait()")
    assert ask("gpus.driver_present()") is True
    assert ask("gpus.nvml._asker.pid") == pid, "a start asks several times, and waits once"
    stub.write(FakeGpu("GPU-a"))  # it answers again, and what waited is gone
    ask("setattr(gpus.nvml, '_not_before', 0.0)")
    assert [gpu["uuid"] for gpu in ask("gpus.list_gpus()")] == ["GPU-a"]


def test_while_one_process_is_stuck_no_other_is_started(stub: NvmlStub, ask: Asker) -> None:
    stub.write(FakeGpu("GPU-a"))
    ask("setattr(gpus.nvml, '_asker', gpus.nvml.subprocess.Popen(['sleep', '60']))")
    pid = ask("gpus.nvml.asker()")
    assert f"process {pid} still waits" in ask("gpus.driver_status()")
    ask("(gpus.nvml._asker.kill(), gpus.nvml._asker.wait())")
    assert ask("gpus.driver_present()") is True
    assert [gpu["uuid"] for gpu in ask("gpus.list_gpus()")] == ["GPU-a"]


def test_a_library_that_crashes_takes_nothing_along(stub: NvmlStub, ask: Asker) -> None:
    stub.write(FakeGpu("GPU-a"), init_result=CRASHES)
    assert ask("gpus.list_gpus()") == []
    assert "broke off (exit status -6); see" in ask("gpus.driver_status()")
    assert ask("gpus.driver_present()") is True, "a server is not sent to the CPU for it"


def test_a_python_that_does_not_know_its_executable(stub: NvmlStub, ask: Asker) -> None:
    stub.write(FakeGpu("GPU-a"))
    for name in (None, ""):
        ask(f"setattr(gpus.nvml.sys, 'executable', {name!r})")
        assert f"({name!r} could not be started" in ask("gpus.driver_status()")


def test_who_asks_the_driver_sees_no_secret(
    stub: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.write(FakeGpu("GPU-a"), init_result=HANGS)
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    ask = Asker(stub.environ)
    ask("setattr(gpus.nvml.subprocess.Popen, 'kill', lambda self: None)")
    ask("gpus.list_gpus(timeout=1.0)")
    environ = Path(f"/proc/{ask('gpus.nvml.asker()')}/environ").read_bytes()
    ask("gpus.nvml._asker.send_signal(9)")
    ask.close()
    assert b"LD_LIBRARY_PATH=" in environ
    assert b"secret" not in environ


def test_a_task_that_is_ended_while_the_driver_hangs_ends_who_asks(stub: NvmlStub) -> None:
    stub.write(FakeGpu("GPU-a"), init_result=HANGS)
    script = """
import os, signal, threading, time
from airflow_provider_vllm.server import nvml
class Ended(Exception): pass
def end(*_): raise Ended
def kill():
    while nvml.asker() is None: time.sleep(0.05)
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)
signal.signal(signal.SIGUSR1, end)
threading.Thread(target=kill).start()
try: nvml.read()
except Ended: print(nvml._asker.wait(5))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **stub.environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "-9\n", done.stderr


def test_who_asks_the_driver_is_no_process_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = GenerationDir(tmp_path / "root" / "servers" / "s" / "1-abc")
    current = ServerState(server_id="s", generation=1, nonce="abc", host="h", pid_namespace="n")
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            pids = [stat.pid for stat in remains.find(directory, current, os.getpid())]
            assert child.pid in pids
            monkeypatch.setattr(nvml, "_asker", child)
            pids = [stat.pid for stat in remains.find(directory, current, os.getpid())]
            assert child.pid not in pids
        finally:
            child.kill()


def test_those_who_wait_for_one_who_waits_for_the_driver_have_more_time() -> None:
    assert launch.SUPERVISOR_S >= nvml.TIMEOUT_S + 30
    assert postmortem.DRIVER_S <= supervisor.DIAGNOSIS_S / 3
    assert nvml.AGAIN_S > postmortem.DRIVER_S


def test_without_a_driver_nothing_is_listed_and_the_reason_is_said(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # before any real one on the search path
    ask = Asker({"LD_LIBRARY_PATH": str(tmp_path)})
    try:
        assert ask("gpus.list_gpus()") == []
        assert ask("gpus.driver_present()") is False
        assert "no NVIDIA driver on this host" in ask("gpus.driver_status()")
    finally:
        ask.close()


def test_memory_of_older_drivers_and_of_gpus_that_share_the_hosts(
    stub: NvmlStub, ask: Asker
) -> None:
    stub.write(FakeGpu("GPU-a", reserved=GIB, used=3 * GIB), memory_results=(0, 13))
    (gpu,) = ask("gpus.list_gpus()")
    assert (gpu["total_bytes"], gpu["free_bytes"]) == (80 * GIB, 76 * GIB)
    stub.write(FakeGpu("GPU-a"), memory_results=(3, 3))
    (gpu,) = ask("gpus.list_gpus()")
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < gpu["free_bytes"] <= gpu["total_bytes"]
    assert gpu["total_bytes"] <= int(fields["MemTotal"].split()[0]) * 1024


def test_a_worker_bound_to_some_gpus_lists_only_those(stub: NvmlStub, ask: Asker) -> None:
    stub.write(*(FakeGpu(f"GPU-{name}") for name in "abc"))
    listed = ask("gpus.list_gpus({'CUDA_VISIBLE_DEVICES': '2,0'})")
    assert [gpu["uuid"] for gpu in listed] == ["GPU-c", "GPU-a"]


def test_importing_needs_no_pynvml() -> None:
    code = "import sys, airflow_provider_vllm.server.gpus; sys.exit('pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.gpu
def test_a_real_driver_is_read() -> None:
    found = gpus.list_gpus({})
    assert found, gpus.driver_status()
    assert gpus.driver_present()
    assert gpus.driver_status().startswith("NVIDIA driver ")
    for one in found:
        assert one.uuid.startswith(("GPU-", "MIG-"))
        assert 0 < one.free_bytes <= one.total_bytes
        assert one.free_bytes + one.used_bytes == one.total_bytes
        assert one.compute_capability
