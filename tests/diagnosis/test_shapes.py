"""Failures as people met them with every vLLM era, in short: verdict, group and root line."""

from __future__ import annotations

import pytest

from airflow_provider_vllm.diagnosis.diagnose import diagnose
from tests.diagnosis.shapes import Case, cases

CASES = cases()


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 100
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(case.verdict in ("healthy", "stopped") for case in CASES) >= 15


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_shape_gets_its_diagnosis(case: Case) -> None:
    found = diagnose(case.lines)
    assert found.verdict == case.verdict
    assert found.root_line == case.root_line
    assert found.group == case.group
    if found.root_line is not None:
        assert found.root_line_number == case.root_line_number
