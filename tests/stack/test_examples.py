"""The example DAGs on a real Airflow with a real vLLM on a real small model, started through REST.

A start of vLLM takes most of a minute on two cores, so the runs are made once, one after the other, and each test
looks at what it is about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.airflow_stack import AirflowStack
from tests.fakes.endpoint import Behaviour, ThreadedEndpoint
from tests.stack.observed import no_strays

pytestmark = [pytest.mark.stack, pytest.mark.vllm]

RUN_S = 300.0
KEY = "s3cret-k3y"
# The run of a day is made at 3 in the next morning; its data are those of the day before.
DAYS = {
    "2026-03-01": ("2026-03-02T03:00:00Z", ["What is the capital of France?"]),
    "2026-03-02": ("2026-03-03T03:00:00Z", ["What is the capital of Japan?", "Say hello."]),
}


@dataclass
class Runs:
    """Run ids and end states by DAG, in the order of their start."""

    stack: AirflowStack
    data: Path
    ids: dict[str, list[str]] = field(default_factory=dict)

    def make(self, dag_id: str, **how: Any) -> None:
        run_id = self.stack.client.run_dag(dag_id, **how)
        self.ids.setdefault(dag_id, []).append(run_id)
        self.stack.client.finish(dag_id, run_id, RUN_S)

    def states(self, dag_id: str, number: int = 0) -> dict[str, str | None]:
        return self.stack.client.states(dag_id, self.ids[dag_id][number])

    def xcom(self, dag_id: str, task_id: str, key: str = "return_value") -> Any:
        return self.stack.client.xcom(dag_id, self.ids[dag_id][0], task_id, key)

    def log(self, dag_id: str, task_id: str) -> str:
        return self.stack.client.log(dag_id, self.ids[dag_id][0], task_id)


@pytest.fixture(scope="module")
def runs(shared_airflow: AirflowStack) -> Iterator[Runs]:
    """Every example has run; the states are read back by the tests."""
    runs = Runs(shared_airflow, shared_airflow.home / "data")
    runs.data.mkdir(exist_ok=True)
    for day, (_, prompts) in DAYS.items():
        lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
        (runs.data / f"{day}.jsonl").write_text("\n".join(lines) + "\n")
    runs.make("example_one_task")
    runs.make("example_shared_server")
    shared_airflow.client.wait_for_dag("example_read_answers")
    shared_airflow.client.unpause("example_read_answers")
    for logical_date, _ in DAYS.values():
        runs.make("example_scheduled_files", logical_date=logical_date)
    yield runs
    no_strays(shared_airflow)


def test_one_task_answers_with_paris(runs: Runs) -> None:
    assert runs.states("example_one_task") == {"ask": "success", "show": "success"}
    answers = runs.xcom("example_one_task", "ask")
    assert len(answers) == 3
    assert "Paris" in answers[0]
    manifest = runs.xcom("example_one_task", "ask", "manifest")
    assert (manifest["rows"], manifest["ok"]) == (3, 3)
    assert answers[0] in runs.log("example_one_task", "show")


def test_the_log_tells_of_the_start_and_of_the_batch(runs: Runs) -> None:
    log = runs.log("example_one_task", "ask")
    for words in ("load weights", "is ready at http://127.0.0.1:", "3 rows: 3 ok"):
        assert words in log


def test_two_batches_on_a_shared_server(runs: Runs) -> None:
    assert set(runs.states("example_shared_server").values()) == {"success"}
    assert len(runs.states("example_shared_server")) == 4
    questions = runs.xcom("example_shared_server", "questions")
    assert "Tokyo" in questions[0]
    assert "Berlin" in questions[1]
    assert len(runs.xcom("example_shared_server", "rephrase")) == 2
    handle = runs.xcom("example_shared_server", "start_vllm_server")
    assert "stop_vllm_server" in runs.states("example_shared_server")
    assert handle["server_id"] in runs.log("example_shared_server", "stop_vllm_server")


def test_each_day_has_its_own_file(runs: Runs) -> None:
    for number, (day, (_, prompts)) in enumerate(DAYS.items()):
        assert runs.states("example_scheduled_files", number) == {"answer": "success"}
        output = runs.data / f"{day}.answers.jsonl"
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(rows) == len(prompts)
        manifest = json.loads((runs.data / f"{day}.answers.jsonl.manifest.json").read_text())
        assert manifest["input"] == [str(runs.data / f"{day}.jsonl")]
    assert "Paris" in (runs.data / "2026-03-01.answers.jsonl").read_text()
    assert "Tokyo" in (runs.data / "2026-03-02.answers.jsonl").read_text()


def test_the_asset_triggers_the_readers_with_the_manifests(runs: Runs) -> None:
    client, dag_id = runs.stack.client, "example_read_answers"

    def counted() -> int:
        states = client.runs(dag_id)
        assert "failed" not in states.values()
        done = [run_id for run_id, state in states.items() if state == "success"]
        return sum(client.xcom(dag_id, run_id, "count") for run_id in done)

    rows = sum(len(prompts) for _, prompts in DAYS.values())
    client.wait_for(counted, lambda seen: seen == rows, timeout=60, what="all rows are counted")
    texts = [client.log(dag_id, run_id, "count") for run_id in client.runs(dag_id)]
    assert "1 of 1 answered, see" in "\n".join(texts)
    assert "2026-03-02.answers.jsonl" in "\n".join(texts)


def test_a_server_that_somebody_else_runs(runs: Runs) -> None:
    with ThreadedEndpoint(Behaviour(models=("llama",), api_key=KEY)) as server:
        connection = {
            "connection_id": "vllm_default",
            "conn_type": "vllm",
            "host": "127.0.0.1",
            "port": server.port,
            "password": KEY,
        }
        runs.stack.client.request("POST", "/connections", json=connection)
        runs.make("example_existing_server")
    dag_id = "example_existing_server"
    assert runs.states(dag_id) == {"wait_for_server": "success", "ask": "success"}
    assert "capital of France" in runs.xcom(dag_id, "ask")[0]
    assert f"{server.base_url} serves llama" in runs.log(dag_id, "wait_for_server")
    for task_id in ("wait_for_server", "ask"):
        assert KEY not in runs.log(dag_id, task_id)
