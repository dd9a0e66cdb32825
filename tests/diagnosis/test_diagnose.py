"""Verdicts: when a server is blamed, when it is not, and what is said where no line has the cause."""

from __future__ import annotations

import io
import time
import tracemalloc

import pytest

from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.diagnosis.rule import Diagnosis

SERVER = "(APIServer pid=1) "
START = SERVER + "INFO 11-30 09:00:00 [api_utils.py:347]  ▄▄ ▄█ █ █ █ ▀▄▀ █  version 0.32.0"
LOADING = "(Worker pid=3) INFO 11-30 09:00:05 [gpu_model_runner.py:1] Starting to load model /m..."
READY = "INFO:     Application startup complete."
OK = 'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK'
SHUTDOWN = (
    SERVER + "INFO 11-30 10:00:00 [launcher.py:254] [shutdown] API server: shutdown triggered"
)
DEAD = SERVER + (
    "ERROR 11-30 10:00:01 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: "
    "EngineCore encountered an issue. See stack trace (above) for the root cause."
)
OOM = (
    "(Worker pid=3) ERROR 11-30 10:00:00 [multiproc_executor.py:1063] "
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
)
REFUSED = [
    "ERROR:    Exception in ASGI application",
    "Traceback (most recent call last):",
    '  File "/srv/starlette/app.py", line 1, in f',
    "ValueError: This model's maximum context length is 4096 tokens.",
]
FRIGHTENING = (
    SERVER
    + "WARNING 11-30 09:00:00 [interface.py:1] Failed to import from vllm._C: ImportError('x')"
)


def _stats(running: int, tokens: float) -> str:
    return (
        f"{SERVER}INFO 11-30 10:05:33 [loggers.py:335] Engine 000: Avg prompt throughput: 0.0 "
        f"tokens/s, Avg generation throughput: {tokens} tokens/s, Running: {running} reqs, "
        "Waiting: 0 reqs, GPU KV cache usage: 1.0%, Prefix cache hit rate: 0.0%"
    )


@pytest.mark.parametrize(
    ("lines", "exit_status", "verdict"),
    [
        ([START, LOADING, READY, OK], None, "healthy"),
        ([START, FRIGHTENING, LOADING, READY, *REFUSED, OK], None, "healthy"),
        ([START, LOADING, READY, OK, SHUTDOWN, DEAD], 0, "stopped"),
        ([START, LOADING, READY, *REFUSED, SHUTDOWN], None, "stopped"),
        ([START, LOADING, READY, OK, DEAD, SHUTDOWN], 0, "failed"),
        ([START, LOADING, READY], -15, "interrupted"),
        ([START, LOADING, READY], 130, "interrupted"),
        ([START, LOADING, READY], -9, "failed"),
        ([START, LOADING], 137, "failed"),
        ([START, LOADING, READY], 1, "failed"),
        ([START, LOADING], None, "stalled"),
        ([START, LOADING, READY, *[_stats(3, 0.0)] * 4], None, "stalled"),
        ([START, LOADING, READY, *[_stats(3, 9.0)] * 4], None, "healthy"),
        ([], None, "unknown"),
        (["nothing that vLLM wrote", "at all"], None, "unknown"),
    ],
)
def test_verdicts(lines: list[str], exit_status: int | None, verdict: str) -> None:
    found = diagnose(lines, exit_status=exit_status)
    assert found.verdict == verdict
    if verdict in ("healthy", "stopped"):
        assert found.root_line is None


def test_a_wrapper_is_never_the_root() -> None:
    died = (
        "(EngineCore pid=2) ERROR 11-30 10:00:00 [multiproc_executor.py:315] Worker proc "
        "VllmWorker-0 died unexpectedly (exit code: -11), shutting down executor."
    )
    found = diagnose([START, LOADING, READY, OK, died, DEAD])
    assert found.root_line is None
    assert (found.group, found.cause) == ("dead_process", "native_crash")
    assert found.process == "VllmWorker-0"
    assert found.wrapper_lines == (died, DEAD)
    assert "not in the log" in found.explanation


def test_the_kernel_log_explains_a_silent_death() -> None:
    kernel = {"oom_kills": ["Out of memory: Killed process 4711 (VLLM::Worker)"], "xid": []}
    found = diagnose([START, LOADING], exit_status=-9, evidence={"kernel_log": kernel})
    assert found.cause == "host_oom_killed"
    assert "4711" in found.explanation
    assert found.retry_launch is False


def test_a_broken_part_of_the_evidence_is_no_evidence() -> None:
    evidence = {"kernel_log": {"missing": "dmesg: not allowed"}}
    assert diagnose([START], exit_status=-9, evidence=evidence).cause == "killed_from_outside"
    assert diagnose([START], exit_status=-9, evidence={}).cause == "killed_from_outside"


def test_an_error_long_before_the_death_is_not_its_cause() -> None:
    survived = OOM.replace("torch.OutOfMemoryError: CUDA out", "ValueError: something else ran out")
    log = [START, LOADING, READY, survived, *[_stats(3, 9.0), OK] * 5, OOM, DEAD]
    assert diagnose(log).root_line == OOM


def test_a_victim_is_blamed_only_where_nothing_else_failed() -> None:
    victim = (
        "(Worker_TP1 pid=4) ERROR 11-30 09:59:59 [multiproc_executor.py:1063] RuntimeError: "
        "NCCL error: remote process exited or there was a network error"
    )
    assert diagnose([START, LOADING, READY, victim, OOM, DEAD]).root_line == OOM
    assert diagnose([START, LOADING, READY, victim, DEAD]).root_line == victim


def test_who_waits_for_a_dead_worker_does_not_know_why_it_died() -> None:
    engine = "(EngineCore pid=2) ERROR 11-30 10:00:00 "
    log = [
        *(START, LOADING, READY, OK),
        f"{engine}[multiproc_executor.py:315] Worker proc Worker_TP1 died unexpectedly, shutting down.",
        f"{engine}[core.py:1512] EngineCore encountered a fatal error.",
        f"{engine}[core.py:1512] TimeoutError: RPC call to execute_model timed out.",
    ]
    found = diagnose(log)
    assert (found.verdict, found.group, found.root_line) == ("failed", "dead_process", None)
    assert found.process == "Worker_TP1"
    found = diagnose([*log[:4], *log[5:]])
    assert found.root_line == log[6]


def test_the_end_of_a_script_is_no_death_of_its_engine() -> None:
    prompts = "Processed prompts: {}|##| 4/4 [00:00<00:00, 10.58it/s]"
    gone = (
        "ERROR 01-07 20:00:59 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly,"
        " shutting down client."
    )
    assert diagnose([START, LOADING, prompts.format("100%"), gone]).verdict == "healthy"
    assert diagnose(
        [START, LOADING, prompts.format("100%"), prompts.format(" 50%"), gone]
    ).verdict == ("failed")


def test_of_several_lives_the_last_is_judged_and_the_rest_mentioned() -> None:
    first = [START, LOADING, OOM, DEAD]
    second = [START, LOADING, READY, OK]
    found = diagnose(first + second)
    assert found.verdict == "healthy"
    assert any("2 starts" in note for note in found.notes)
    found = diagnose(second + first)
    assert (found.verdict, found.root_line_number) == ("failed", len(second) + 3)


def test_a_life_that_only_began_gives_way_to_the_one_before() -> None:
    found = diagnose([START, LOADING, OOM, DEAD, START, LOADING])
    assert (found.verdict, found.root_line_number) == ("failed", 3)


def test_the_remedy_is_one_argument_with_the_number_of_the_message() -> None:
    line = (
        "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510] ValueError: Free memory on device "
        "cuda:{} ({}/80.0 GiB) on startup is less than desired GPU memory utilization "
        "(0.92, 73.6 GiB)."
    )
    found = diagnose([line.format(0, "70.0"), line.format(1, "52.1")])
    assert found.remedy == {"gpu_memory_utilization": 0.65}


def test_json_there_and_back() -> None:
    found = diagnose([START, LOADING, OOM, DEAD])
    value = found.to_json()
    assert set(value) == {
        "verdict",
        "group",
        "cause",
        "root_line",
        "root_line_number",
        "process",
        "wrapper_lines",
        "retry",
        "explanation",
        "first_action",
        "remedy",
        "confidence",
    }
    assert Diagnosis.from_json(value).to_json() == value
    with pytest.raises(ValueError, match="not a diagnosis"):
        Diagnosis.from_json({**value, "verdict": "odd"})


def test_the_short_text_says_cause_root_line_and_action() -> None:
    found = diagnose([START, LOADING, OOM, DEAD])
    text = found.short()
    assert found.explanation in text
    assert OOM[:100] in text
    assert found.first_action in text


def test_the_full_text_holds_context_and_colour_only_when_asked() -> None:
    log = [START, LOADING, "line before", OOM, DEAD, "line after"]
    found = diagnose(log)
    text = found.text()
    assert "\x1b" not in text
    assert "line before" in text
    assert "line after" in text
    assert "\x1b[" in found.text(colour=True)


def test_memory_stays_bounded_on_a_large_log() -> None:
    busy = (OK + "\n").encode() * 20_000
    odd = (SERVER + "WARNING 11-30 10:00:00 [a.py:1] " + "odd " * 500 + "\n").encode() * 40

    def blocks() -> bytes:
        return b"\n".join(line.encode() for line in (START, LOADING, READY)) + b"\n"

    whole = blocks() + (busy + odd) * 25 + (OOM + "\n" + DEAD + "\n").encode()
    stream = io.BytesIO(whole)
    tracemalloc.start()
    try:
        found = diagnose(stream)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(whole) > 30_000_000
    assert found.root_line == OOM
    assert found.root_line_number == whole.count(b"\n") - 1
    assert peak < 60_000_000


def test_repeated_errors_are_read_quickly_and_do_not_hide_the_death() -> None:
    start = "\n".join((START, LOADING, READY)).encode() + b"\n"
    error = (
        "\n".join(SERVER + "ERROR 11-30 10:00:00 [s.py:2] " + x for x in REFUSED) + "\n"
    ).encode()
    whole = start + error * (30_000_000 // len(error)) + (OOM + "\n" + DEAD + "\n").encode()
    began = time.process_time()
    found = diagnose(io.BytesIO(whole))
    spent = time.process_time() - began
    assert found.root_line == OOM
    assert spent < 5  # it was four times as much when each line was searched


def test_long_words_cost_no_more_than_their_length() -> None:
    image = "iVBORw0KGgo/" * 1300
    lines = [
        SERVER
        + "ERROR 11-30 10:00:00 [s.py:2] ValueError: cannot read data:image/png;base64,"
        + image,
        SERVER + "INFO 11-30 10:00:00 [s.py:3] got " + image,
        "-" * 15_000,
    ]
    began = time.process_time()
    assert diagnose([START, LOADING, READY, OK, *lines * 30, OOM, DEAD]).root_line == OOM
    assert time.process_time() - began < 5  # 0.6 s; a word's length squared took minutes


def test_thousands_of_errors_after_the_death_do_not_hide_it() -> None:
    after = [
        *REFUSED[:3],
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    ]
    long = [line + " " * 900 for line in after]
    log = [START, LOADING, READY, OK, OOM, DEAD, *long * 6000]
    assert diagnose(log).root_line == OOM


def test_an_unreadable_path_is_an_oserror(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OSError, match="No such file"):
        diagnose(tmp_path / "none.log")


def test_what_a_subprocess_printed_into_the_message_is_the_root() -> None:
    prefix = "ERROR 04-28 07:56:28 [registry.py:354] "
    root = "ModuleNotFoundError: No module named 'pandas'"
    inside = [
        "Error in inspecting model architecture 'GraniteForCausalLM'",
        "Traceback (most recent call last):",
        '  File "/srv/vllm/model_executor/models/registry.py", line 594, in _run_in_subprocess',
        "RuntimeError: Error raised in subprocess:",
        "Traceback (most recent call last):",
        '  File "/srv/torch/_dynamo/__init__.py", line 3, in <module>',
        root,
    ]
    end = "ValueError: Model architectures ['GraniteForCausalLM'] failed to be inspected."
    found = diagnose([*(prefix + line for line in inside), end])
    assert found.root_line == prefix + root


def test_native_lines_explain_what_follows_them_only() -> None:
    watchdog = (
        "[rank1]:[E1126 10:00:00.1 ProcessGroupNCCL.cpp:2068] [PG ID 2 Rank 1] Process group "
        "watchdog thread terminated with exception: CUDA error: an illegal memory access"
        " was encountered"
    )
    worker = (
        "(Worker_TP1 pid=4) ERROR 11-26 10:00:00 [multiproc_executor.py:671] "
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    )
    assert diagnose([START, READY, watchdog, worker, DEAD]).root_line == watchdog
    assert diagnose([START, READY, worker, watchdog, DEAD]).root_line == worker


def test_an_error_of_a_parent_whose_children_start_afterwards_is_harmless() -> None:
    logged = SERVER + "ERROR 11-30 09:00:01 [fa_utils.py:57] "
    trace = [
        "Cannot use FA version 2",
        "Traceback (most recent call last):",
        '  File "/srv/vllm/fa_utils.py", line 1, in f',
        "ImportError: libcudart.so.12: cannot open shared object file",
    ]
    engine = (
        "(EngineCore pid=2) INFO 11-30 09:00:02 [core.py:133] Initializing a V1 LLM engine (v0)"
    )
    found = diagnose([START, *(logged + line for line in trace), engine, LOADING])
    assert found.verdict == "stalled"


def test_waits_during_a_start_are_no_stall_of_the_server() -> None:
    wait = (
        "(EngineCore pid=2) INFO 11-30 09:03:00 [shm_broadcast.py:108] No available shared memory "
        "broadcast block found in 60 seconds."
    )
    assert diagnose([START, LOADING, *[wait] * 5, READY, OK]).verdict == "healthy"
    assert diagnose([START, LOADING, READY, OK, *[wait] * 5]).verdict == "stalled"


def test_a_script_that_came_to_its_end_is_healthy() -> None:
    engine = "INFO 11-30 09:00:02 [core.py:133] Initializing a V1 LLM engine (v0.11) with config"
    done = "Processed prompts: 100%|██████████| 4/4 [00:02<00:00,  1.5it/s]"
    assert diagnose([engine, done]).verdict == "healthy"
    crash = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "KeyError: 'x'"]
    assert diagnose([engine, done, *crash]).root_line == "KeyError: 'x'"


def test_a_stop_that_ends_in_sigkill_is_a_stop() -> None:
    assert diagnose([START, LOADING, READY, OK, SHUTDOWN], exit_status=-9).verdict == "stopped"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("vllm-1 exited with code 137", "killed_from_outside"),
        (
            "systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL",
            "killed_from_outside",
        ),
        ("[error]worker exited with exit code 136", "native_crash"),
    ],
)
def test_whoever_ran_it_wrote_its_exit_status_under_the_log(line: str, cause: str) -> None:
    found = diagnose([START, LOADING, line])
    assert (found.verdict, found.group) == ("failed", "dead_process")
    assert found.cause == cause
    assert diagnose([START, LOADING, READY, OK, "vllm-1 exited with code 0"]).verdict == "healthy"
    assert diagnose([START, LOADING, READY, OK, SHUTDOWN, line]).verdict == "stopped"


def test_a_shell_that_says_killed() -> None:
    found = diagnose(
        [START, LOADING, "serve.sh: line 46:  7164 Killed                  vllm serve"]
    )
    assert (found.verdict, found.cause) == ("failed", "killed_from_outside")
    assert diagnose([START, LOADING, "Terminated"]).verdict == "interrupted"
