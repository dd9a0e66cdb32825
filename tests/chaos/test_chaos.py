"""Every fault, at every process, at every moment: no row lost, none doubled, nothing left.

make test        the short cells
make chaos       all; prints the table and writes docs/reliability.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_vllm.server.state import StateRoot
from scripts.airflow_stack import AirflowStack
from scripts.example_airflow import example_environ, example_settings
from scripts.set_up import ROOT
from tests.chaos.cells import CELLS, Cell
from tests.chaos.harness import LEASE_S, ROWS, STARTUP_S, Outcome, Run
from tests.chaos.report import table, write_page

pytestmark = [pytest.mark.vllm, pytest.mark.stack]

# A dead task is noticed within this, instead of the five minutes of Airflow's default.
HEARTBEAT_S = 12
SETTINGS = {
    "scheduler": {
        "task_instance_heartbeat_timeout": str(HEARTBEAT_S),
        "task_instance_heartbeat_timeout_detection_interval": "2",
        "scheduler_idle_sleep_time": "0.2",
    },
    "workers": {"min_heartbeat_interval": "2"},
}


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[Outcome]]:
    found: list[Outcome] = []
    yield found
    if found:
        print("\n" + table(found))
    if len(found) > len([cell for cell in CELLS if cell.short]):
        write_page(ROOT / "docs" / "reliability.md", found, cells=len(CELLS))


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[AirflowStack]:
    home = tmp_path_factory.mktemp("chaos")
    environ = {
        **example_environ(home),
        "CHAOS_MODEL": str(tiny_model),
        "CHAOS_LEASE_S": str(LEASE_S),
        "CHAOS_STARTUP_S": str(STARTUP_S),
        "HF_HUB_OFFLINE": "1",
    }
    stack = AirflowStack(
        home,
        [Path(__file__).with_name("dags")],
        settings={**example_settings(home), **SETTINGS},
        environ=environ,
    )
    with stack:
        yield stack


def cases() -> list[object]:
    return [
        pytest.param(cell, id=cell.name, marks=[] if cell.short else [pytest.mark.chaos])
        for cell in CELLS
    ]


@pytest.mark.parametrize("cell", cases())
def test_no_row_is_lost_and_nothing_is_left(
    airflow: AirflowStack, tmp_path: Path, outcomes: list[Outcome], cell: Cell
) -> None:
    root = StateRoot(airflow.home / "vllm")
    outcome = Run(airflow, root, tmp_path / "files", cell).disturb()
    outcomes.append(outcome)
    print(table([outcome]))
    assert outcome.state == "success"
    assert (outcome.lost, outcome.doubled, outcome.in_order) == (0, 0, True)
    assert outcome.counted == {"ok": ROWS}
    assert (outcome.locks, outcome.segments, outcome.temporary) == (0, 0, 0)
    assert outcome.all_gone < LEASE_S + 30
