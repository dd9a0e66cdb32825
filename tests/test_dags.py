"""The example DAGs: each imports, says what it shows, and is wired as it says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from scripts.set_up import ROOT
from tests import airflow_unit  # noqa: F401 - before Airflow is imported
from tests.airflow_unit import stored

EXAMPLES = sorted((ROOT / "dags").glob("*.py"))
DAG_IDS = {
    "example_existing_server": {"example_existing_server"},
    "example_one_task": {"example_one_task"},
    "example_scheduled_files": {"example_scheduled_files", "example_read_answers"},
    "example_shared_server": {"example_shared_server"},
}


def dags_of(path: Path) -> dict[str, Any]:
    """The DAGs of a file as Airflow's DAG processor finds them. Fails where it does not import."""
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(path, load_op_links=False)
    assert bag.import_errors == {}
    return dict(bag.dags)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
class TestExample:
    def test_it_imports_without_error(self, path: Path) -> None:
        dags = dags_of(path)
        assert set(dags) == DAG_IDS[path.stem]
        for dag in dags.values():
            assert "vllm" in dag.tags
            stored(dag)

    def test_it_says_what_it_shows_and_is_short(self, path: Path) -> None:
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text))
        assert len(text.splitlines()) <= 60


def test_the_shared_server_is_set_up_before_and_torn_down_after_both_batches() -> None:
    dag = dags_of(ROOT / "dags" / "example_shared_server.py")["example_shared_server"]
    start, stop = dag.get_task("start_vllm_server"), dag.get_task("stop_vllm_server")
    assert start.is_setup
    assert stop.is_teardown
    assert {"questions", "rephrase"} <= set(start.downstream_task_ids)
    assert "rephrase" in stop.upstream_task_ids


def test_the_files_of_a_day_carry_the_day() -> None:
    dag = dags_of(ROOT / "dags" / "example_scheduled_files.py")["example_scheduled_files"]
    task = dag.get_task("answer")
    assert "data_interval_start" in task.input_path
    assert "data_interval_start" in task.output_path
    assert task.input_path != task.output_path
