"""Stages and fatal lines, on lines as vLLM of several eras prints them."""

from __future__ import annotations

import pytest

from airflow_provider_vllm.diagnosis.stages import STAGES, is_fatal, stage_of

STAGE_LINES = [
    (
        "import",
        "(APIServer pid=7) INFO 11-30 09:47:15 [api_utils.py:286] non-default args: {'a': 1}",
    ),
    (
        "import",
        "INFO 05-04 14:43:15 llm_engine.py:100] Initializing an LLM engine (v0.4.2) with config",
    ),
    ("download", "model-00001-of-00004.safetensors:  12%|█▏        | 598M/4.98G [00:14<01:43]"),
    ("download", "Fetching 8 files:  25%|██▌       | 2/8 [00:10<00:30,  5.1s/it]"),
    (
        "load weights",
        "(Worker pid=9) INFO 11-30 09:47:31 [cpu_model_runner.py:68] Starting to load model /m...",
    ),
    (
        "load weights",
        "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]",
    ),
    (
        "load weights",
        "INFO 05-04 14:43:20 model_runner.py:173] Loading model weights took 14.9595 GB",
    ),
    ("compile", "INFO 03-27 22:26:17 [backends.py:430] Dynamo bytecode transform time: 5.12 s"),
    (
        "compile",
        "(Worker pid=9) INFO 11-30 09:47:32 [cpu_model_runner.py:87] Warming up model for the compilation...",
    ),
    ("warm up", "Capturing CUDA graph shapes: 100%|██████████| 35/35 [00:17<00:00,  2.04it/s]"),
    ("warm up", "INFO 03-27 22:26:22 [kv_cache_utils.py:833] GPU KV cache size: 127,472 tokens"),
    ("warm up", "INFO 05-04 14:43:23 gpu_executor.py:119] # GPU blocks: 2358, # CPU blocks: 2048"),
]
SILENT = [
    "",
    'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK',
    "INFO 01-01 00:00:00 [logger.py:41] Received request cmpl-1: prompt: 'Loading weights took 1', params",
    "(APIServer pid=7) INFO 11-30 10:05:43 [loggers.py:335] Engine 000: Avg prompt throughput: 0.0 tokens/s",
]
FATAL = [
    "(EngineCore pid=2) ERROR 11-30 10:00:00 [core.py:1510] EngineCore failed to start.",
    "(EngineCore_DP0 pid=2) ERROR 02-23 09:06:43 [core.py:718] EngineCore failed to start.",
    "ERROR 05-23 09:31:47 [core.py:396] EngineCore failed to start.",
    "ERROR 03-05 09:31:47 core.py:290] EngineCore hit an exception: Traceback (most recent call last):",
    "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "(APIServer pid=1) WARNING 11-30 10:05:59 [core_client.py:817] [shutdown] MPClient: engine core "
    "exited unexpectedly; starting cleanup",
    "CRITICAL 03-05 09:31:47 [core_client.py:191] Got fatal signal from worker processes, shutting down.",
    "2026-02-03T04:05:06.789Z ERROR 05-23 09:31:47 [core.py:396] EngineCore failed to start.",
    "vllm-1  | ERROR 05-23 09:31:47 [core.py:396] EngineCore failed to start.",
    "RuntimeError: Engine loop has died",
    "\x1b[0;36m(APIServer pid=1)\x1b[0;0m \x1b[31mERROR\x1b[0m \x1b[90m11-30 10:02:50\x1b[0m "
    "\x1b[90m[async_llm.py:906]\x1b[0m AsyncLLM output_handler failed.",
]
HARMLESS = [
    "(EngineCore pid=2) INFO 11-30 09:47:46 [core.py:1454] [shutdown] EngineCore: trigger received signal=SIGTERM",
    "(Worker pid=3) INFO 11-30 10:05:59 [multiproc_executor.py:843] Parent process exited, terminating worker queues",
    "INFO 01-01 00:00:00 [logger.py:41] Received request cmpl-1: prompt: 'EngineCore failed to start.'",
    "    raise EngineDeadError()",
    '  File "vllm/v1/engine/core.py", line 1510, in run_engine_core',
    "ERROR 11-30 10:00:00 [serving.py:10] Error with model error=ErrorInfo(message='EngineDeadError')",
    "WARNING 11-30 10:00:00 [cpu_worker.py:114] libtcmalloc is not found in LD_PRELOAD.",
]


@pytest.mark.parametrize(("stage", "line"), STAGE_LINES)
def test_a_line_names_its_stage(stage: str, line: str) -> None:
    assert stage in STAGES
    assert stage_of(line) == stage
    assert not is_fatal(line)


@pytest.mark.parametrize("line", SILENT)
def test_other_lines_name_no_stage(line: str) -> None:
    assert stage_of(line) is None


@pytest.mark.parametrize("line", FATAL)
def test_a_dead_engine_is_fatal(line: str) -> None:
    assert is_fatal(line)


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_not_fatal(line: str) -> None:
    assert not is_fatal(line)
