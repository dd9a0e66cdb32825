"""All checks together: what a spec on this worker gives, how fast, and without any effect."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.exceptions import PreflightFailed
from airflow_provider_vllm.server import gpu_locks, preflight
from airflow_provider_vllm.server.gpus import Gpu
from airflow_provider_vllm.server.preflight import Finding
from airflow_provider_vllm.server.private import private_dir
from airflow_provider_vllm.server.sizes import GIB
from airflow_provider_vllm.spec import ServerSpec
from tests.fakes.model_files import write_adapter, write_model
from tests.server.test_interpreter import site


def gpu(uuid: str = "GPU-a", total: int = 80, free: int = 80) -> Gpu:
    return Gpu(uuid, 0, "H100", total * GIB, free * GIB, (total - free) * GIB)


class Worker:
    """A worker whose interpreter has the GPU build of vLLM, and its state root."""

    def __init__(self, folder: Path) -> None:
        self.state_root = private_dir(folder / "state")
        self.site = site(folder / "site", vllm="0.32.0")
        self.folder = folder

    def check(
        self, model: str | Path, *gpus: Gpu, environ: Mapping[str, str] | None = None, **spec: Any
    ) -> Sequence[Finding]:
        found = preflight.check(
            ServerSpec(
                model=str(model),
                env={"PYTHONPATH": str(self.site), **spec.pop("env", {})},
                **spec,
            ),
            gpus=gpus,
            state_root=self.state_root,
            environ={**os.environ, "HF_HOME": str(self.folder / "hf"), **(environ or {})},
            python=sys.executable,
            budget_s=10,
        )
        assert all(finding.message and finding.fix for finding in found)
        return found


def ids(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in findings]


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_a_good_spec_gives_nothing(worker: Worker, model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    assert worker.check(model, gpu(), lora_modules={"a": str(adapter)}) == ()


def test_a_real_model_on_the_real_cpu_build_gives_nothing(
    tiny_model: Path, vllm_python: Path, tmp_path: Path
) -> None:
    spec = ServerSpec(
        model=str(tiny_model), gpus=0, python=str(vllm_python), env={"VLLM_CPU_KVCACHE_SPACE": "1"}
    )
    begin = time.monotonic()
    found = preflight.check(
        spec, gpus=(), state_root=private_dir(tmp_path / "state"), environ=os.environ
    )
    assert found == ()
    assert time.monotonic() - begin < 2


def test_slow_things_are_not_waited_for(model: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    begin = time.monotonic()
    found = preflight.check(
        ServerSpec(
            model=str(model), python=str(python), port=1, host="192.0.2.1", auth_conn_id="x"
        ),
        gpus=(),
        state_root=private_dir(tmp_path / "state"),
        environ=os.environ,
        budget_s=0.5,
    )
    assert time.monotonic() - begin < 2
    assert ("interpreter", "warning") in ids(found)
    assert ("host", "error") in ids(found)


def test_a_disk_that_hangs_is_a_warning_and_the_other_checks_are_made(
    worker: Worker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read of a network disk whose server is gone waits for ever; so does that of a pipe."""
    os.mkfifo(pipe := tmp_path / "pipe")
    monkeypatch.setattr(preflight.model, "read_weights", lambda *_, **__: pipe.read_bytes())
    begin = time.monotonic()
    found = preflight.check(
        ServerSpec(model=str(model), port=1, host="192.0.2.1", auth_conn_id="x"),
        gpus=(),
        state_root=worker.state_root,
        environ=os.environ,
        budget_s=0.5,
    )
    assert time.monotonic() - begin < 2
    assert ("model", "warning") in ids(found)
    assert "hangs" in next(each.message for each in found if each.check == "model")
    assert ("host", "error") in ids(found)
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


def test_everything_wrong_is_said_at_once_errors_first(worker: Worker, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = worker.check(
            tmp_path / "none",
            gpu("GPU-a", free=8),
            gpu("GPU-b", free=8),
            gpus=2,
            port=listener.getsockname()[1],
            lora_modules={"a": str(tmp_path / "nowhere")},
        )
    assert ids(found) == [
        ("port", "error"),
        ("model-path", "error"),
        ("lora", "error"),
        ("gpu-count", "warning"),
        ("gpu-memory", "warning"),
    ]


def test_a_model_too_big_for_the_gpus_of_this_worker(worker: Worker, tmp_path: Path) -> None:
    big = write_model(tmp_path / "big", parameters=70 * 10**9, shards=30)
    (finding,) = worker.check(big, gpu(), gpu("GPU-b"))
    assert (finding.check, finding.level) == ("gpu-weights", "error")
    args = {"tensor_parallel_size": 2, "max_model_len": 8192}
    assert worker.check(big, gpu(), gpu("GPU-b"), gpus=2, engine_args=args) == ()


def test_the_gpus_are_those_that_the_start_would_get(worker: Worker, model: Path) -> None:
    both = gpu("GPU-a", total=80), gpu("GPU-b", total=8)
    assert worker.check(model, *both, gpus=("GPU-a",)) == ()
    assert ids(worker.check(model, *both, gpus=("GPU-b",))) == [("context-length", "error")]
    assert worker.check(model, *both) == ()  # the one with more memory
    fds = gpu_locks.take(worker.state_root / "locks", ["GPU-a"])
    assert ids(worker.check(model, *both)) == [("context-length", "error")]
    # All locked: that is for waiting, not for failing.
    fds += gpu_locks.take(worker.state_root / "locks", ["GPU-b"])
    assert worker.check(model, *both) == ()
    gpu_locks.release(fds)


def test_more_gpus_than_this_worker_has(worker: Worker, model: Path) -> None:
    found = worker.check(model, gpu(), gpus=2)
    assert found[0].check == "gpu-count"
    assert "2 GPU(s) asked for, 1 can be had" in found[0].message
    # None is listed: what the driver says, and nothing about a server on the CPU.
    (first,) = worker.check(model, gpus=1)
    assert (first.check, first.level) == ("gpus", "error")
    assert first.message.startswith("1 GPU(s) asked for, and none can be had: ")
    with pytest.raises(PreflightFailed) as caught:
        preflight.enforce([first], "fail")
    assert caught.value.diagnosis
    assert caught.value.diagnosis["group"] == "environment"
    found = worker.check(model, gpu(), gpus=("GPU-x",))
    assert "GPU-x: not a GPU of this worker" in found[0].message


def test_no_gpu_at_all_is_a_cpu_server(worker: Worker, model: Path) -> None:
    (finding,) = (f for f in worker.check(model) if f.level == "error")
    assert finding.check == "build"  # the interpreter has the GPU build


def test_a_command_of_ones_own(worker: Worker, model: Path) -> None:
    command = ("no-such-vllm", "--port", "{port}")
    (finding,) = worker.check(model, gpu(), command=command)
    assert (finding.check, finding.level) == ("command", "error")
    assert worker.check(model, gpu(), command=(sys.executable, "{port}")) == ()


def test_a_hub_model_that_is_not_here(worker: Worker, tmp_path: Path) -> None:
    assert worker.check("org/name", gpu()) == ()
    assert ids(worker.check("org/name-9000B", gpu())) == [("disk", "warning")]
    offline = worker.check("org/name", gpu(), env={"HF_HUB_OFFLINE": "1"})
    assert ids(offline) == [("model-cache", "error")]
    (tmp_path / "file").touch()
    blocked = worker.check("org/name", gpu(), env={"HF_HOME": str(tmp_path / "file" / "hf")})
    assert ids(blocked) == [("hub-cache", "error")]


def test_the_workers_secrets_do_not_decide(worker: Worker, tmp_path: Path) -> None:
    """Only what vLLM will see of the environment counts."""
    noisy = {"PYTHONPATH": str(tmp_path / "elsewhere"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert worker.check("org/name", gpu(), environ=noisy) == ()


def test_a_state_root_that_others_can_read(worker: Worker, model: Path) -> None:
    (worker.state_root / "locks").mkdir(mode=0o755)
    (worker.state_root / "locks").chmod(0o755)
    assert ("state-root", "error") in ids(worker.check(model, gpu()))


def test_checks_change_nothing(worker: Worker, model: Path, tmp_path: Path) -> None:
    def snapshot() -> list[tuple[str, int, int]]:
        paths = sorted(tmp_path.rglob("*"))
        return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]

    before = snapshot()
    worker.check(model, gpu())
    worker.check("org/name-9000B", gpu(), port=65001)
    assert snapshot() == before


def test_errors_stop_the_start_unless_told_otherwise() -> None:
    error = Finding("port", "error", "Port 80 is taken.", "Set `port=0`.")
    warning = Finding("shm", "warning", "64 MiB.", "Give more.")
    preflight.enforce([warning], "fail")
    preflight.enforce([error, warning], "warn")
    preflight.enforce([error, warning], "off")
    with pytest.raises(PreflightFailed) as caught:
        preflight.enforce([error, warning], "fail")
    text = str(caught.value)
    assert "[port] Port 80 is taken. Set `port=0`." in text
    assert "64 MiB" not in text


def test_findings_can_be_written_as_json(worker: Worker, tmp_path: Path) -> None:
    (finding,) = worker.check(tmp_path / "none", gpu())
    assert json.loads(json.dumps(finding.__dict__))["check"] == "model-path"
