"""Answers as columns beside the input's: a CSV or Parquet user never has to see JSONL."""

from __future__ import annotations

import csv
import datetime
import gzip
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from airflow_provider_vllm.batch.run import run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed
from tests.batch.helpers import LOG, ForeignLink, batch_row, read_rows, run, write_rows
from tests.fakes.endpoint import ThreadedEndpoint

PEOPLE = [
    {"id": 1, "prompt": "a", "score": 0.5, "tags": ["x", "y"], "note": None},
    {"id": 2, "prompt": "[[status 400]]", "score": 2, "tags": [], "note": "n"},
    {"id": 3, "prompt": "c", "score": 1.5, "tags": None, "note": "ü, \"quoted\"\n2nd line"},
]  # fmt: skip


def read_csv(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return list(csv.DictReader(text.decode().splitlines(keepends=True)))


def spec(source: Path, target: Path, **more: Any) -> BatchSpec:
    return BatchSpec(input_path=str(source), output_path=str(target), max_error_rate=0.5, **more)


@pytest.mark.parametrize("target", ["out.jsonl", "out.csv", "out.csv.gz", "out.parquet"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_from_any_form_to_any_form(
    link: ForeignLink, tmp_path: Path, kind: str, target: str
) -> None:
    source = tmp_path / f"in.{kind}"
    if kind == "jsonl":
        write_rows(source, PEOPLE)
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(PEOPLE), source)
    else:
        with source.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(PEOPLE[0]))
            writer.writeheader()
            writer.writerows(PEOPLE)
    out = tmp_path / target
    result = run(spec(source, out, output_format="columns"), link, tmp_path)
    assert result.manifest.outcomes == {"ok": 2, "rejected": 1}
    if target.endswith(".jsonl"):
        rows = read_rows(out)
    elif target.endswith(".parquet"):
        rows = parquet.read_table(out).to_pylist()
    else:
        rows = read_csv(out)
    assert list(rows[0]) == [*PEOPLE[0], "response", "error"]
    assert [str(row["id"]) for row in rows] == ["1", "2", "3"]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in PEOPLE]
    assert rows[2]["note"] == PEOPLE[2]["note"]
    assert rows[0]["response"].endswith("user: a")
    assert [bool(row["response"]) for row in rows] == [True, False, True]
    assert [bool(row["error"]) for row in rows] == [False, True, False]
    assert len(read_rows(Path(str(result.manifest.errors_path)))) == 1


def test_parquet_keeps_its_types(link: ForeignLink, tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "prompt": ["a", "b"],
            "when": pyarrow.array([datetime.datetime(2026, 1, 2), None], pyarrow.timestamp("us")),
            "vector": pyarrow.array([[1.0], [2.0, 3.0]], pyarrow.list_(pyarrow.float32())),
        }
    ).replace_schema_metadata({"made by": "a test"})
    parquet.write_table(table, tmp_path / "in.parquet")
    run(spec(tmp_path / "in.parquet", tmp_path / "out.parquet"), link, tmp_path)
    out = parquet.read_table(tmp_path / "out.parquet")
    assert out.schema.field("when").type == pyarrow.timestamp("us")
    assert out.schema.field("vector").type == pyarrow.list_(pyarrow.float32())
    assert out.schema.metadata[b"made by"] == b"a test"
    assert out.select(["prompt", "when", "vector"]).to_pylist() == table.to_pylist()


def test_embeddings_are_a_column_of_vectors(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "b"}])
    run(spec(source, tmp_path / "out.parquet", endpoint="embeddings"), link, tmp_path)
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [len(row["response"]) for row in rows] == [4, 4]


def test_more_rows_than_a_group_in_order(link: ForeignLink, tmp_path: Path) -> None:
    prompts = [f"p{index}" for index in range(2500)]
    parquet.write_table(pyarrow.table({"prompt": prompts}), tmp_path / "in.parquet")
    run(spec(tmp_path / "in.parquet", tmp_path / "out.parquet"), link, tmp_path)
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == prompts
    assert all(row["response"].endswith(f"user: {row['prompt']}") for row in rows)


def test_several_files_with_different_columns(link: ForeignLink, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "x": 1}, b"{broken\n"])
    write_rows(tmp_path / "b.jsonl", ["plain text", {"prompt": "b", "x": "text", "y": True}])
    one = BatchSpec(
        input_path=str(tmp_path / "?.jsonl"),
        output_path=str(tmp_path / "out.csv"),
        max_error_rate=0.5,
        answer_column="said",
        error_column="why",
    )
    run(one, link, tmp_path)
    rows = read_csv(tmp_path / "out.csv")
    assert list(rows[0]) == ["prompt", "x", "y", "said", "why"]
    assert [row["prompt"] for row in rows] == ["a", "", "plain text", "b"]
    assert "a.jsonl, line 2" in rows[1]["why"]


def test_a_list_may_become_a_table(link: ForeignLink, tmp_path: Path) -> None:
    prompts = ["a", [{"role": "user", "content": "b"}], batch_row("x", "c", url="/v1/completions")]
    target = tmp_path / "out.jsonl"
    one = BatchSpec(prompts=prompts, output_path=str(target), output_format="columns")
    run(one, link, tmp_path)
    assert [row["response"].split(" ")[-1] for row in read_rows(target)] == ["a", "b", "c"]


def test_an_input_that_changes_under_the_batch(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    server.behaviour.latency = 0.3

    def change(_: object) -> None:
        write_rows(source, [{"prompt": "a"}])

    one = spec(source, tmp_path / "out.csv", progress_interval=0.05)
    with pytest.raises(BatchFailed, match="had 2 rows when it was sent and has 1 now"):
        run_batch(one, link, journal_dir=str(tmp_path / "journal"), log=LOG, on_progress=change)
    assert not (tmp_path / "out.csv").exists()
