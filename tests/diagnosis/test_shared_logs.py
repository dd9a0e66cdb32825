"""Logs of vLLM 0.32 (CPU build) that was made to fail on purpose, and what each must come to."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.diagnosis.diagnose import diagnose

LOGS = Path(__file__).parent / "logs"
EXPECTED: dict[str, dict[str, Any]] = json.loads((LOGS / "expected.json").read_text())


def test_every_log_is_in_the_table() -> None:
    assert sorted(EXPECTED) == sorted(
        path.name.removesuffix(".log.gz") for path in LOGS.glob("*.gz")
    )
    assert len(EXPECTED) == 35


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_log_gets_its_diagnosis(name: str) -> None:
    expected = EXPECTED[name]
    with gzip.open(LOGS / f"{name}.log.gz") as log:
        found = diagnose(log, exit_status=expected["exit_status"])
    assert {key: getattr(found, key) for key in expected if key != "exit_status"} == {
        key: value for key, value in expected.items() if key != "exit_status"
    }
    if found.root_line is not None:
        text = gzip.decompress((LOGS / f"{name}.log.gz").read_bytes()).decode(errors="replace")
        line = text.split("\n")[(found.root_line_number or 0) - 1]
        assert found.root_line in line


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_without_its_exit_status_no_healthy_server_is_blamed(name: str) -> None:
    expected = EXPECTED[name]
    with gzip.open(LOGS / f"{name}.log.gz") as log:
        found = diagnose(log)
    if expected["verdict"] == "stopped":
        assert found.verdict == "stopped"
    if expected["root_line"] is not None:
        assert found.root_line == expected["root_line"]
