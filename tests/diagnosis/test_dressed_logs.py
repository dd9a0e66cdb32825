"""The same real logs as other programs dress them: coloured, in JSON, cut at the head, one after another."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from airflow_provider_vllm.diagnosis.colour import plain
from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.diagnosis.rule import Diagnosis

LOGS = Path(__file__).parent / "logs"
NAMES = sorted(path.name.removesuffix(".log.gz") for path in LOGS.glob("*.gz"))
COLOURS = {"DEBUG": 37, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 35}
PROCESS = re.compile(r"^\(\w[^()]* pid=\d+\)")
LOGGED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) (\[\S+:\d+\])")
UVICORN = re.compile(r"^(INFO|WARNING|ERROR):(?= )")


@cache
def _lines(name: str) -> tuple[str, ...]:
    text = gzip.decompress((LOGS / f"{name}.log.gz").read_bytes()).decode(errors="replace")
    return tuple(re.sub(r"\r(?!\n)", " ", text).split("\n"))


@cache
def _plainly(name: str) -> Diagnosis:
    return diagnose(_lines(name))


def _coloured(line: str) -> str:
    """As vLLM's logger and uvicorn's colour it on a terminal."""
    line = PROCESS.sub(lambda m: f"\x1b[0;36m{m[0]}\x1b[0;0m", line)
    line = UVICORN.sub(lambda m: f"\x1b[{COLOURS[m[1]]}m{m[1]}\x1b[0m:", line)
    return LOGGED.sub(
        lambda m: f"\x1b[{COLOURS[m[1]]}m{m[1]}\x1b[0m \x1b[90m{m[2]}\x1b[0m \x1b[90m{m[3]}\x1b[0m",
        line,
        count=1,
    )


def _same(found: Diagnosis, expected: Diagnosis) -> None:
    assert (found.verdict, found.group, found.cause, found.root_line_number) == (
        expected.verdict,
        expected.group,
        expected.cause,
        expected.root_line_number,
    )


@pytest.mark.parametrize("escape", ["\x1b", ""], ids=["colours", "remains of colours"])
@pytest.mark.parametrize("name", NAMES)
def test_colours_change_nothing(name: str, escape: str) -> None:
    log = [_coloured(line).replace("\x1b", escape) for line in _lines(name)]
    expected = _plainly(name)
    for found in (diagnose(log), diagnose(io.BytesIO("\n".join(log).encode()))):
        _same(found, expected)
        assert found.root_line == expected.root_line
        assert found.wrapper_lines == expected.wrapper_lines


def test_what_is_no_colour_stays() -> None:
    for text in ("x[1m] took 10ms", "a[0] = [0, 1]m", "[rank0]: ValueError: shape [10m", ""):
        assert plain(text) == text
    assert plain("\x1b[1;31mA\x1b[0m\x1b[K\x1b]0;title\x07B") == "AB"


DRESSES: dict[str, Callable[[str], object]] = {
    "google": lambda line: {"insertId": "x1", "severity": "ERROR", "textPayload": line},
    "google json": lambda line: {"jsonPayload": {"message": line}, "resource": {"labels": {}}},
    "docker": lambda line: {"log": line + "\n", "stream": "stderr", "time": "2026-02-03T04:05:06Z"},
    "coloured": lambda line: {"log": _coloured(line) + "\r\n", "stream": "stdout"},
    "fluentd": lambda line: {"kubernetes": {"pod_name": "vllm"}, "msg": line, "level": "info"},
    "journald": lambda line: {"MESSAGE": line, "PRIORITY": "6", "_PID": "7"},
    "twice": lambda line: {"message": json.dumps({"log": line, "stream": "stderr"})},
    "open telemetry": lambda line: {"body": {"stringValue": line}, "severityText": "INFO"},
}


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("name", NAMES)
def test_json_around_each_line_changes_nothing(name: str, dress: str) -> None:
    log = [json.dumps(DRESSES[dress](line), ensure_ascii=False) for line in _lines(name)]
    found, expected = diagnose(log), _plainly(name)
    _same(found, expected)
    if found.root_line is not None:
        assert found.root_line == plain(log[(found.root_line_number or 0) - 1])


def _cuts(name: str) -> Sequence[int]:
    many = len(_lines(name))
    every = 3 if name.startswith(("16_", "18_", "22_")) else max(1, many // 10)
    return range(1, many, every)


ASKED = re.compile(r"\[shutdown\] (?:API server|EngineCore)")
DEAD = re.compile(r"AsyncLLM output_handler failed|EngineDeadError")


@pytest.mark.parametrize("name", NAMES)
def test_a_log_without_its_head(name: str) -> None:
    whole, lines = _plainly(name), _lines(name)
    for cut in _cuts(name):
        found = diagnose(lines[cut:])
        if whole.verdict in ("healthy", "stopped"):
            tail = "\n".join(lines[cut:])
            if (dead := DEAD.search(tail)) and not ASKED.search(tail, 0, dead.start()):
                continue  # nobody can see that the engine was asked to end
            assert found.verdict in ("healthy", "stopped", "unknown"), cut
        elif whole.root_line_number is not None and cut < whole.root_line_number - 1:
            assert (found.verdict, found.cause) == (whole.verdict, whole.cause), cut
            assert found.root_line == whole.root_line


@pytest.mark.parametrize(
    "stopped", ["00_baseline", "27_sigterm_server", "18_lora_rank_too_large_dynamic"]
)
@pytest.mark.parametrize("failed", ["03_unknown_arg", "23_rlimit_as_1G"])
def test_a_start_that_dies_before_its_banner_is_not_the_stop_before_it(
    stopped: str, failed: str
) -> None:
    assert _plainly(stopped).verdict == "stopped"
    found = diagnose([*_lines(stopped), *_lines(failed)[1:]])
    alone = _plainly(failed)
    assert (found.verdict, found.cause, found.root_line) == ("failed", alone.cause, alone.root_line)


@pytest.mark.parametrize(
    "line",
    [
        "bash: line 1: vllm: command not found",
        "/usr/bin/python3: No module named vllm",
        "/usr/bin/python3: Error while finding module specification for 'vllm.entrypoints' (x)",
    ],
)
def test_a_start_without_a_program_is_no_stop(line: str) -> None:
    assert diagnose([*_lines("00_baseline"), line]).verdict in ("failed", "unknown")


def test_a_second_interrupt_during_a_stop_is_still_that_stop() -> None:
    again = [
        "Traceback (most recent call last):",
        '  File "<frozen runpy>", line 198, in _run_module_as_main',
        '  File "/srv/vllm/entrypoints/openai/api_server.py", line 900, in <module>',
        "    uvloop.run(run_server(args))",
        '  File "/usr/lib/python3.11/asyncio/runners.py", line 118, in run',
        "RuntimeError: Event loop stopped before Future completed.",
    ]
    assert diagnose([*_lines("28_sigint_server"), *again]).verdict == "stopped"
