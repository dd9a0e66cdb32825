"""Real vLLM that cannot start, through the real operator: the error's last lines name the cause.

Preflight is off here, since it would find most of these before vLLM does.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.exceptions import StartFailed
from airflow_provider_vllm.server.processes import every_process
from airflow_provider_vllm.server.state import StateRoot
from airflow_provider_vllm.spec import ServerSpec
from tests.airflow_unit import FakeTaskInstance, context_of

from airflow_provider_vllm import worker  # isort: skip - after Airflow has a home

pytestmark = pytest.mark.vllm

TINY = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 256}
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
START_S = 300


@dataclass
class Failed:
    """A failed start: the error, what the task logged, its XComs and the server's directory."""

    error: StartFailed
    xcoms: dict[str, Any]
    root: StateRoot
    lines: list[str] = field(default_factory=list)

    @property
    def diagnosis(self) -> dict[str, Any]:
        return self.xcoms["diagnosis"]


@pytest.fixture
def root(tmp_path: Path, vllm_python: Path, monkeypatch: pytest.MonkeyPatch) -> StateRoot:
    monkeypatch.setenv("AIRFLOW__VLLM__STATE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("AIRFLOW__VLLM__PYTHON", str(vllm_python))
    return StateRoot(tmp_path / "vllm")


@pytest.fixture
def start(root: StateRoot) -> Any:
    from airflow_provider_vllm.operators.start import StartVllmServerOperator

    def run(model: Path | str, *, env: dict[str, str] = ENV, **fields: Any) -> Failed:
        fields.setdefault("engine_args", TINY)
        spec = {
            "model": str(model),
            "env": env,
            "gpus": 0,
            "preflight": "off",
            "start_attempts": 1,
            "startup_timeout": START_S,
            **fields,
        }
        ti = FakeTaskInstance()
        operator = StartVllmServerOperator(task_id="start", spec=spec)
        with pytest.raises(StartFailed) as caught:
            operator.execute(context_of(ti))
        return Failed(caught.value, ti.xcoms, root, str(caught.value).splitlines())

    return run


def named(failed: Failed, cause: str, root_line: str) -> None:
    """The last lines name the cause and the step, and the same stands in XCom and on disk."""
    found = failed.diagnosis
    assert found["cause"] == cause
    assert found["root_line"] is not None
    assert root_line in found["root_line"]
    end = "\n".join(failed.lines[-3:])
    assert cause in end
    assert found["first_action"] in end
    (directory,) = failed.root.every_generation()
    assert json.loads(directory.diagnosis_file.read_text()) == found
    evidence = json.loads((directory.path / "evidence.json").read_text())
    assert evidence["launch"]["exit_status"] == failed.error.exit_status
    assert failed.error.report
    assert "Root line" in failed.error.report


def test_missing_model(start: Any, tmp_path: Path) -> None:
    failed = start(tmp_path / "no_such_model")
    named(failed, "model_path_not_found", "no_such_model")
    assert failed.error.exit_status == 1
    assert failed.diagnosis["retry"]["launch"] is False


def test_unknown_option(start: Any, tiny_model: Path) -> None:
    failed = start(tiny_model, engine_args={**TINY, "no_such_option": 1})
    named(failed, "invalid_cli_argument", "--no-such-option")
    assert failed.error.exit_status == 2


def test_model_length_above_the_models_own(start: Any, tiny_model: Path) -> None:
    failed = start(tiny_model, engine_args={**TINY, "max_model_len": 1_000_000})
    named(failed, "max_model_len_above_model_limit", "max_model_len")
    limit = json.loads((tiny_model / "config.json").read_text())["max_position_embeddings"]
    assert failed.diagnosis["remedy"] == {"max_model_len": limit}


def test_cache_too_small_for_one_request(start: Any, tiny_model: Path) -> None:
    env = {name: value for name, value in ENV.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    args = {**TINY, "max_model_len": 512, "kv_cache_memory_bytes": 131072}
    failed = start(tiny_model, env=env, engine_args=args)
    named(failed, "max_model_len_exceeds_kv_cache", "KV cache")
    assert list(failed.diagnosis["remedy"]) == ["max_model_len"]


def test_truncated_weights(start: Any, tiny_model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    failed = start(broken)
    named(failed, "weights_broken", "SafetensorError")
    assert failed.diagnosis["process"].startswith("Worker")


def test_port_taken_by_another_process(start: Any, tiny_model: Path, vllm_python: Path) -> None:
    """Taken between our look and vLLM's: here by a command line of its own."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        module = "vllm.entrypoints.openai.api_server"
        command = [str(vllm_python), "-m", module, f"--model={tiny_model}", f"--port={port}"]
        command += ["--host=127.0.0.1", "--enforce-eager", "--served-model-name=on-{port}"]
        failed = start(tiny_model, command=command, port=_free_port())
    named(failed, "port_in_use", "Address already in use")
    assert failed.diagnosis["retry"]["launch"] is True


def test_worker_killed_while_it_loads(start: Any, tiny_model: Path, root: StateRoot) -> None:
    killer = threading.Thread(target=_kill_the_worker, args=(root,), daemon=True)
    killer.start()
    failed = start(tiny_model)
    killer.join(timeout=10)
    found = failed.diagnosis
    assert found["group"] == "dead_process"
    end = "\n".join(failed.lines[-3:])
    assert found["cause"] in end
    assert found["first_action"] in end
    assert "Engine core initialization failed" not in (found["root_line"] or "")
    assert found["retry"]["launch"] is True


def _kill_the_worker(root: StateRoot) -> None:
    """SIGKILL the worker of the only server as soon as it exists."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for directory in root.every_generation():
            state = directory.read()
            session = state.engine.pid if state and state.engine else -1
            for process in every_process():
                if process.session == session and process.name == "VLLM::Worker":
                    process.identity.signal(9)
                    return
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_remedy_is_applied_once_and_both_launches_are_logged(
    root: StateRoot, tiny_model: Path
) -> None:
    from airflow_provider_vllm.server.launch import LaunchOptions
    from airflow_provider_vllm.server.start import start

    limit = json.loads((tiny_model / "config.json").read_text())["max_position_embeddings"]
    # In a spelling of its own: the remedy has to replace it all the same.
    args = {name: value for name, value in TINY.items() if name != "max_model_len"}
    spec = ServerSpec(
        model=str(tiny_model),
        engine_args={**args, "max-model-len": 1_000_000},
        env=ENV,
        gpus=0,
        preflight="off",
        startup_timeout=START_S,
    )
    lines: list[str] = []
    options = LaunchOptions(python=worker.default_python())
    running = start(spec, "remedied", root, options, report=lines.append, apply_remedy=True)
    running.stop("test")
    first, second = root.generations("remedied")
    assert f"--max-model-len={limit}" in second.supervisor_log.read_text()
    assert "--max-model-len=1000000" in first.supervisor_log.read_text()
    assert any(str(limit) in line and "1000000" in line for line in lines)
