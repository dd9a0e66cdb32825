"""A batch whose files are all on object storage, through Airflow's ObjectStoragePath."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from airflow.sdk import ObjectStoragePath
from airflow.sdk.io import attach

from airflow_provider_vllm import VllmBatchOperator
from airflow_provider_vllm.batch.shards import merge, split
from airflow_provider_vllm.operators.batch import to_path
from tests.airflow_unit import FakeTaskInstance, context_of
from tests.server.conftest import fake_spec

BUCKET = "memory://storage-of-the-test"


@pytest.fixture(autouse=True)
def storage() -> Iterator[None]:
    """fsspec's memory, known to Airflow as a storage of its own."""
    files = fsspec.filesystem("memory")
    attach("memory", fs=files)
    to_path(BUCKET).mkdir(parents=True, exist_ok=True)
    yield
    files.rm(BUCKET.removeprefix("memory:/"), recursive=True)


def put(name: str, text: str) -> str:
    """A file of the storage, gzipped where its name says so."""
    data = text.encode()
    with to_path(f"{BUCKET}/{name}").open("wb") as file:
        file.write(gzip.compress(data) if name.endswith(".gz") else data)
    return f"{BUCKET}/{name}"


def rows_of(name: str) -> list[dict[str, Any]]:
    path = to_path(f"{BUCKET}/{name}")
    assert isinstance(path, ObjectStoragePath)
    with path.open("rb") as file:
        return [json.loads(line) for line in file.read().splitlines()]


def ask(task_id: str = "ask", **arguments: Any) -> Any:
    operator = VllmBatchOperator(task_id=task_id, spec=fake_spec(), **arguments)
    return operator.execute(context_of(FakeTaskInstance(task_id=task_id)))


def test_a_glob_in_and_results_errors_manifest_and_journal_out(root: Any) -> None:
    put("in/a.jsonl", '{"prompt": "one"}\n{"prompt": 2}\n')
    put("in/b.jsonl.gz", "".join(json.dumps({"prompt": f"b{index}"}) + "\n" for index in range(30)))
    more = {"input_path": f"{BUCKET}/in/*", "output_path": f"{BUCKET}/out.jsonl"}
    manifest = ask(**more)
    assert manifest["outcomes"] == {"invalid_input": 1, "ok": 31}
    assert [row["custom_id"] for row in rows_of("out.jsonl")] == [
        "row-1",
        *(f"row-{number}" for number in range(3, 33)),
    ]
    (error,) = rows_of("out.jsonl.errors.jsonl")
    assert error["error"]["file"] == f"{BUCKET}/in/a.jsonl"
    assert error["error"]["line"] == 2
    # The next try, on any host, finds the journal there, and starts no server.
    starts = len(root.every_generation())
    put("in/a.jsonl", '{"prompt": "one"}\n{"prompt": "2"}\n')
    again = ask(**more)
    assert (again["reused"], again["ok"]) == (31, 32)
    ask(**more)
    assert len(root.every_generation()) == starts + 1
    assert not to_path(f"{BUCKET}/out.jsonl.errors.jsonl").exists()


def test_shards_of_a_table(root: Any) -> None:
    source = put("in.csv", "prompt\n" + "".join(f"p{index}\n" for index in range(10)))
    shards = split(source, f"{BUCKET}/work", shards=2, to_path=to_path)
    parts = [
        ask(f"ask_{index}", output_path=f"{BUCKET}/part-{index}.csv", **shard)
        for index, shard in enumerate(shards)
    ]
    merge(parts, f"{BUCKET}/all.csv", to_path=to_path)
    with to_path(f"{BUCKET}/all.csv").open() as file:
        lines = file.read().splitlines()
    assert lines[0] == "prompt,response,error"
    assert [line.partition(",")[0] for line in lines[1:]] == [f"p{index}" for index in range(10)]
