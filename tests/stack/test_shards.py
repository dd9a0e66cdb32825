"""A CSV split, answered by mapped tasks and merged to Parquet, on a real Airflow with servers that behave like vLLM."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from pyarrow import parquet  # type: ignore[import-untyped]

from scripts.airflow_stack import AirflowStack
from tests.server.conftest import fake_spec

pytestmark = pytest.mark.stack

RUN_S = 120.0
ROWS = 10


def test_shards_of_a_csv_become_one_parquet_file_in_order(
    stack: AirflowStack, tmp_path: Path
) -> None:
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("title", "text"), *((f"title {n}", f"text, {n}") for n in range(ROWS))]
        )
    conf = {"spec": fake_spec({"orphan_session": True}).to_json(), "folder": str(tmp_path)}
    run_id = stack.client.run_dag("vllm_shards", conf)

    assert stack.client.finish("vllm_shards", run_id, RUN_S) == "success"

    states = stack.client.states("vllm_shards", run_id)
    assert {"ask[0]", "ask[1]", "ask[2]"} <= set(states)
    assert set(states.values()) == {"success"}
    rows = parquet.read_table(tmp_path / "answers.parquet").to_pylist()
    assert [row["title"] for row in rows] == [f"title {n}" for n in range(ROWS)]
    for number, row in enumerate(rows):
        assert row["response"].endswith(f"Summarise title {number}: text, {number}")
    manifest = stack.client.xcom("vllm_shards", run_id, "merge")
    assert (manifest["rows"], manifest["ok"], manifest["shards"]) == (ROWS, ROWS, 3)
