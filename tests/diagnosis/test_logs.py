"""Log shapes: what eras, other programs and terminals do to one and the same failure."""

from __future__ import annotations

import io
import json

import pytest

from airflow_provider_vllm.diagnosis.colour import plain
from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.diagnosis.logs import records
from airflow_provider_vllm.diagnosis.prefix import split_prefix

ROOT = "ValueError: No available memory for the cache blocks. Try increasing it."
FRAMES = (
    "EngineCore failed to start.",
    "Traceback (most recent call last):",
    '  File "/srv/vllm/v1/engine/core.py", line 1482, in run_engine_core',
    "    engine_core = EngineCoreProc(*args)",
    "                  ^^^^^^^^^^^^^^^^^^^^^",
    '  File "/srv/vllm/v1/core/kv_cache_utils.py", line 1010, in check',
    "    raise ValueError(",
    ROOT,
)
WRAPPER = (
    "Traceback (most recent call last):",
    '  File "/srv/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup',
    "    raise RuntimeError(",
    "RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}",
)
ENGINE = {
    "0.32": "(EngineCore pid=7) ERROR 11-30 09:49:07 [core.py:1510] ",
    "0.11": "(EngineCore_DP0 pid=7) ERROR 10-01 09:49:07 [core.py:718] ",
    "0.10.1": "(EngineCore_0 pid=7) ERROR 08-01 09:49:07 [core.py:632] ",
    "0.8": "ERROR 05-23 09:49:07 [core.py:396] ",
    "coloured": "\x1b[0;36m(EngineCore_DP0 pid=7)\x1b[0;0m ERROR 10-01 09:49:07 [core.py:718] ",
    "colour remains": "[36m(EngineCore pid=7)[0m ERROR 10-01 09:49:07 [core.py:718] ",
    "debug": "(EngineCore pid=7) ERROR 11-30 09:49:07 [v1/engine/core.py:1510] ",
}
FOREIGN = {
    "nothing": "",
    "compose": "vllm-server-1  | ",
    "rfc 3339": "2026-02-03T04:05:06.123456789Z ",
    "journald": "Apr  3 17:38:57 gpuhost vllm[140223]: ",
    "kubectl": "2026-02-03T04:05:06.123456789Z stderr F ",
    "brackets": "[2026-02-03T04:05:06Z] ",
    "python logging": "2026-02-03 04:05:06,123 - INFO - vLLM: ",
    "supervisor": "2026-06-09 14:01:54.604 [Info] (Process) ",
    "stage": "[Stage-0] ",
    "unknown": "worker7 stdout> ",
}


def _log(engine: str, foreign: str) -> list[str]:
    own = [foreign + engine + line for line in FRAMES]
    return own + [foreign + line for line in WRAPPER]


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("era", ENGINE)
def test_every_era_behind_every_prefix(era: str, foreign: str) -> None:
    log = _log(ENGINE[era], FOREIGN[foreign])
    found = diagnose(log)
    assert (found.verdict, found.cause) == ("failed", "no_available_kv_cache_memory")
    assert found.root_line == plain(log[len(FRAMES) - 1])
    assert found.root_line_number == len(FRAMES)
    assert found.process is not None
    assert found.process.startswith("EngineCore")
    assert any("Engine core initialization failed" in line for line in found.wrapper_lines)


def test_version_0_without_prefixes() -> None:
    prefix = "ERROR 11-20 08:34:06 engine.py:366] "
    log = [prefix + line for line in (ROOT.removeprefix("ValueError: "), *FRAMES[1:])]
    found = diagnose([*log, "RuntimeError: Engine process failed to start. See stack trace"])
    assert found.root_line == prefix + ROOT
    assert found.process == "Engine"


def test_the_deepest_process_is_blamed_whatever_the_order() -> None:
    worker = "(Worker_TP1 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:953] "
    engine = "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510] "
    log = [
        engine + "EngineCore failed to start.",
        worker + "WorkerProc failed to start.",
        engine + "Traceback (most recent call last):",
        worker + "Traceback (most recent call last):",
        engine + '  File "/srv/vllm/v1/engine/core.py", line 1, in f',
        worker + '  File "/srv/vllm/v1/worker/gpu_worker.py", line 2, in load_model',
        engine + "ValueError: something that follows from it",
        worker + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
    ]
    found = diagnose(log)
    assert (found.cause, found.process) == ("cuda_oom_weights", "Worker_TP1")
    assert found.root_line == log[-1]


def test_the_first_exception_of_a_chain_is_the_root() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "/srv/a.py", line 1, in f',
        "RuntimeError: shape '[2048, 2048]' is invalid for input of size 16777216",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        '  File "/srv/b.py", line 1, in g',
        "ValueError: Error in model execution: shape '[2048, 2048]' is invalid",
    ]
    assert diagnose(log).root_line == log[2]


def test_ray_prints_the_remote_traceback_after_the_local_one() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "/srv/ray/worker.py", line 1, in get',
        "ray.exceptions.RayTaskError(AssertionError): ray::RayWorkerWrapper.execute_method() (pid=5)",
        '  File "/srv/vllm/worker/worker.py", line 3, in execute_model',
        "    assert isinstance(data, Metadata)",
        "AssertionError",
    ]
    found = diagnose(log)
    assert found.root_line == "AssertionError"
    assert found.wrapper_lines == (log[2],)


def test_repeated_marks_of_ray_go() -> None:
    line = "(RayWorkerWrapper pid=1, ip=10.0.0.2) ERROR 03-11 15:24:45 [worker_base.py:620] X"
    made = records([(1, line + " [repeated 4x across cluster]")])
    assert (made[0].text, made[0].process) == ("X", "RayWorkerWrapper")


def test_lines_cut_at_a_terminals_width_are_joined() -> None:
    width = 100
    lines = [
        *_log(ENGINE["0.32"], ""),
        "(EngineCore pid=7) INFO 11-30 09:49:07 [a.py:1] " + "x" * 120,
    ]
    log = [line[at : at + width] for line in lines for at in range(0, len(line), width)]
    found = diagnose(log * 3)
    assert found.cause == "no_available_kv_cache_memory"
    assert found.root_line is not None
    assert "ValueError: No available memory" in found.root_line
    assert len(found.root_line) == width


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_line_ends_and_broken_bytes(newline: bytes) -> None:
    lines = [line.encode() for line in _log(ENGINE["0.11"], "")]
    lines.insert(0, b"\xff\xfe broken \xc3\x28 bytes")
    found = diagnose(io.BytesIO(newline.join(lines)))
    assert found.root_line == ENGINE["0.11"] + ROOT
    assert found.root_line_number == len(FRAMES) + 1


def test_a_progress_bar_before_the_line() -> None:
    bar = "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.2s/it]"
    found = diagnose([bar + "\r" + ENGINE["0.32"] + ROOT])
    assert found.root_line == ENGINE["0.32"] + ROOT


def test_messages_inside_json() -> None:
    log = [json.dumps({"log": line + "\n", "stream": "stderr"}) for line in _log(ENGINE["0.8"], "")]
    found = diagnose(log)
    assert found.cause == "no_available_kv_cache_memory"
    assert found.root_line == log[len(FRAMES) - 1]


def test_box_drawings_around_lines() -> None:
    log = [f"│ {line:<150} │" for line in _log(ENGINE["0.8"], "")]
    assert diagnose(log).root_line == log[len(FRAMES) - 1]


def test_prefixes_that_stack() -> None:
    found = split_prefix("(EngineCore_0 pid=1) (VllmWorker TP0 pid=2) ERROR 08-01 1:2:3 [a.py:1] x")
    assert (found.process, found.pid) == ("VllmWorker TP0", 2)
    found = split_prefix("[rank0]: ValueError: x")
    assert (found.process, found.text) == ("rank0", "ValueError: x")
    assert split_prefix("[multiproc_executor.py:492] ValueError: x").text == "ValueError: x"
    assert split_prefix('{"prompt": "ERROR 08-01 10:00:00 [a.py:1] x"}').level is None
