"""The batch benchmark, cut short: every contender still runs, and every ratio of the documentation is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def printed(*arguments: str) -> str:
    """What a benchmark prints. Its targets are for its full length, so that it may miss some."""
    command = [sys.executable, "-m", "benchmarks.batch", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in found.stderr, found.stderr
    assert found.returncode in (0, 1), found.stderr
    return found.stdout


def ratios(text: str) -> dict[str, list[float]]:
    """The numbers of the lines that judge, by their words."""
    found: dict[str, list[float]] = {}
    for name, value in re.findall(r"^  (?:ok  |MISS) (.+): ([\d.]+) \(target", text, re.MULTILINE):
        found.setdefault(name, []).append(float(value))
    return found


@pytest.mark.parametrize("word", ["provider", "bare", "aiohttp", "openai"])
def test_every_contender_answers_rows(mock_run: str, word: str) -> None:
    speeds = re.findall(rf"^  {word} +([\d,]+) rows/s", mock_run, re.MULTILINE)
    assert len(speeds) == (3 if word == "provider" else 2)
    assert all(int(speed.replace(",", "")) > 0 for speed in speeds)


def test_every_ratio_is_printed(mock_run: str) -> None:
    found = ratios(mock_run)
    assert {name: len(values) for name, values in found.items()} == {
        "times AsyncOpenAI": 2,
        "of the bare loop": 2,
        "CPU a row, of AsyncOpenAI's": 2,
        "of in flight / latency": 1,
    }
    assert min(found["times AsyncOpenAI"]) > 1


@pytest.fixture(scope="module")
def mock_run() -> str:
    return printed("mock", "--rounds", "1", "--scale", "0.02")


def test_memory_is_measured() -> None:
    found = ratios(printed("million", "--rows", "200000"))
    assert set(found) == {
        "MiB above the start, at most",
        "MiB grown after a tenth",
        "MiB above the start, of a retry that has all answers",
        "speed of the last third, of the first",
    }
    assert found["MiB above the start, at most"] != [0.0]
