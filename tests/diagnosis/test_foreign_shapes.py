"""What other programs and terminals do to a log changes nothing in its diagnosis."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.diagnosis.foreign import learn_prefix
from airflow_provider_vllm.diagnosis.rule import Diagnosis
from tests.diagnosis.shapes import cases

LOGS = Path(__file__).parent / "logs"
EXPECTED = json.loads((LOGS / "expected.json").read_text())


def _clock(number: int) -> str:
    return f"16:{number // 60 % 60:02}:{number % 60:02}"


Change = Callable[[int, str], list[str]]
CHANGES: dict[str, Change] = {
    "containerd": lambda n, line: [f"2026-02-06T{_clock(n)}.1234567Z stderr F {line}"],
    "kubetail": lambda n, line: [f"[pod/vllm-7d9f8-abcde/vllm] {line}"],
    "srun": lambda n, line: [f"0: {line}"],
    "a launcher's logger": lambda n, line: [
        f"2026-02-06 {_clock(n)}.123 | INFO     | launcher:stream:88 - {line}"
    ],
    "an agent's logger": lambda n, line: [
        f"2026-02-06T{_clock(n)}+08:00 - agent.worker - INFO - {line}"
    ],
    "an actor": lambda n, line: [f"(vLLMHttpServer pid=3953561) {line}"],
    "docker's json-file": lambda n, line: [
        json.dumps({"log": line + "\n", "stream": "stderr", "time": f"2026-02-06T{_clock(n)}Z"})
    ],
    "indentation": lambda n, line: ["    " + line],
    "empty lines between": lambda n, line: [line, ""],
    "a quote": lambda n, line: ["> " + line],
    "a terminal of 120": lambda n, line: [
        line[at : at + 120] for at in range(0, max(1, len(line)), 120)
    ],
}
LARGE = {
    name: gzip.decompress((LOGS / f"{name}.log.gz").read_bytes())
    .decode(errors="replace")
    .replace("\r\n", "\n")
    .replace("\r", "\n")
    .split("\n")
    for name in EXPECTED
}


@functools.cache
def _plain(name: str) -> Diagnosis:
    return diagnose(LARGE[name], exit_status=EXPECTED[name]["exit_status"])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_log_behind_other_programs(name: str, change: str) -> None:
    lines, origin = [], [0]
    for number, line in enumerate(LARGE[name], start=1):
        pieces = CHANGES[change](number, line)
        lines.extend(pieces)
        origin.extend([number] * len(pieces))
    found = diagnose(lines, exit_status=EXPECTED[name]["exit_status"])
    plain = _plain(name)
    assert (found.verdict, found.group, found.cause) == (plain.verdict, plain.group, plain.cause)
    if plain.root_line_number is not None and found.root_line_number is not None:
        assert (
            LARGE[name][origin[found.root_line_number] - 1]
            == LARGE[name][plain.root_line_number - 1]
        )
        assert found.root_line == lines[found.root_line_number - 1]
    assert (found.root_line is None) == (plain.root_line is None)


@pytest.mark.parametrize("change", sorted(set(CHANGES) - {"a terminal of 120"}))
def test_hardly_any_short_excerpt_is_lost_behind_them(change: str) -> None:
    wrong = []
    for case in cases():
        lines = [piece for n, line in enumerate(case.lines) for piece in CHANGES[change](n, line)]
        found = diagnose(lines)
        if (found.verdict, found.group) != (case.verdict, case.group):
            wrong.append(case.name)
        if case.verdict in ("healthy", "stopped"):
            assert found.verdict in ("healthy", "stopped"), case.name
    assert len(wrong) <= 3, wrong


@pytest.mark.parametrize(
    "lines",
    [
        ["(EngineCore pid=7) ERROR 11-30 09:49:07 [core.py:1510] a", "b"] * 5,
        ["(EngineCore pid=7) ERROR 11-30 09:49:07 [core.py:1510] same"] * 5,
        ['INFO:     10.0.0.2:4444 - "POST /v1/completions HTTP/1.1" 200 OK'] * 5,
        ['  File "/srv/a.py", line 3, in f', "    g()"] * 5 + ["ValueError: no"],
        ['{"message": "a", "level": "INFO"}'] * 5,
    ],
)
def test_vllms_own_text_is_no_foreign_prefix(lines: list[str]) -> None:
    assert learn_prefix(lines) is None
