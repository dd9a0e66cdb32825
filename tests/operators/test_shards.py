"""A DAG that splits its input, asks the parts in mapped tasks and merges them, as its author writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task

from airflow_provider_vllm import VllmBatchOperator
from airflow_provider_vllm.batch.shards import merge, split
from tests.airflow_unit import FakeTaskInstance, context_of, stored
from tests.fakes.endpoint import ThreadedEndpoint

ROWS = 10


class Outputs(Sequence[Any]):
    """What a mapped task hands on: no list, and fetched anew each time."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return json.loads(json.dumps(self._values[index]))


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_split_ask_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    source, work = tmp_path / f"in.{suffix}", str(tmp_path / "work")
    head, row = ("prompt\n", "p{}\n") if suffix == "csv" else ("", '{{"prompt": "p{}"}}\n')
    source.write_text(head + "".join(row.format(number) for number in range(ROWS)))
    with DAG("sharded", schedule=None) as dag:
        shards = task(split)(str(source), work, shards=3)
        parts = VllmBatchOperator.partial(
            task_id="ask",
            vllm_conn_id="some",
            output_path=f"{work}/{{{{ ti.map_index }}}}.{suffix}",
        ).expand_kwargs(shards)
        task(merge)(parts.output, str(tmp_path / f"out.{suffix}"))
    assert "ask" in stored(dag)

    made = json.loads(json.dumps(split(str(source), work, shards=3)))  # through XCom
    outputs = []
    with ThreadedEndpoint() as server:
        connection = {"conn_type": "vllm", "host": "127.0.0.1", "port": server.port}
        monkeypatch.setenv("AIRFLOW_CONN_SOME", json.dumps(connection))
        for index, shard in enumerate(made):
            context = context_of(FakeTaskInstance(task_id="ask", map_index=index))
            one = dag.get_task("ask").unmap(shard)
            one.render_template_fields(context)
            outputs.append(one.execute(context))
    whole = merge(Outputs(outputs), str(tmp_path / f"out.{suffix}"))
    assert (whole["rows"], whole["ok"], whole["shards"]) == (ROWS, ROWS, 3)
    lines = (tmp_path / f"out.{suffix}").read_text().splitlines()[suffix == "csv" :]
    assert len(lines) == ROWS
    assert all(f"user: p{number}" in line for number, line in enumerate(lines))
    if suffix == "jsonl":
        ids = [json.loads(line)["custom_id"] for line in lines]
        assert ids == [f"row-{number}" for number in range(1, ROWS + 1)]
