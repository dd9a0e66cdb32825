"""Values and files that a table cannot take as they are: found before, or kept as text."""

from __future__ import annotations

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from airflow_provider_vllm.batch.run import check_inputs, run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed, InvalidPrompts
from tests.batch.helpers import LOG, ForeignLink, read_rows, run, write_rows
from tests.fakes.endpoint import ThreadedEndpoint


def table(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return found
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def spec(source: Path, target: Path, **more: Any) -> BatchSpec:
    return BatchSpec(input_path=str(source), output_path=str(target), max_error_rate=1, **more)


def test_an_input_replaced_by_as_many_rows(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    server.behaviour.latency = 0.3

    def change(_: object) -> None:
        write_rows(source, [{"prompt": "b"}, {"prompt": "a"}])

    one = spec(source, tmp_path / "out.csv", progress_interval=0.05)
    with pytest.raises(BatchFailed, match="input was changed while the batch ran"):
        run_batch(one, link, journal_dir=str(tmp_path / "journal"), log=LOG, on_progress=change)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16-le"])
def test_a_header_in_another_encoding(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "in.csv").write_bytes("prompt,größe\na,b\n".encode(encoding))
    with pytest.raises(InvalidPrompts, match=r"in\.csv, line 1: the header is not UTF-8"):
        check_inputs(spec(tmp_path / "in.csv", tmp_path / "out.csv"))


@pytest.mark.parametrize("values", [[1, 1 << 63], [0.5, (1 << 63) - 1], [(1 << 53) + 1, 1.5]])
def test_large_integers_to_parquet(link: ForeignLink, tmp_path: Path, values: list[Any]) -> None:
    rows = [{"prompt": "a", "n": value} for value in values]
    source = write_rows(tmp_path / "in.jsonl", rows)
    run(spec(source, tmp_path / "out.parquet"), link, tmp_path)
    assert [json.loads(str(row["n"])) for row in table(tmp_path / "out.parquet")] == values


def test_parquet_files_with_other_columns(link: ForeignLink, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a"], "n": [1]}), tmp_path / "a.parquet")
    parquet.write_table(
        pyarrow.table({"n": [2], "more": ["x"], "prompt": ["b"]}), tmp_path / "b.parquet"
    )
    run(spec(tmp_path / "?.parquet", tmp_path / "out.parquet"), link, tmp_path)
    rows = table(tmp_path / "out.parquet")
    assert [(row["prompt"], row["n"], row["more"]) for row in rows] == [
        ("a", 1, None),
        ("b", 2, "x"),
    ]
    parquet.write_table(pyarrow.table({"prompt": ["c"], "n": ["text"]}), tmp_path / "c.parquet")
    with pytest.raises(InvalidPrompts, match=r"c\.parquet has other types"):
        check_inputs(spec(tmp_path / "?.parquet", tmp_path / "other.parquet"))


def test_several_vectors_a_row(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"input": "a"}, {"input": ["a", "b"]}])
    run(spec(source, tmp_path / "out.parquet", endpoint="embeddings"), link, tmp_path)
    rows = table(tmp_path / "out.parquet")
    assert [len(json.loads(row["response"])) for row in rows] == [4, 2]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_values_that_no_json_library_likes(link: ForeignLink, tmp_path: Path, suffix: str) -> None:
    deep: Any = "bottom"
    for _ in range(900):
        deep = [deep]
    rows = [{"prompt": "a", "x": deep}, {"prompt": "b", "x": 1 << 70}]
    target = tmp_path / f"out{suffix}"
    one = BatchSpec(
        prompts=rows, output_path=str(target), output_format="columns", max_error_rate=1
    )
    run(one, link, tmp_path)
    found = read_rows(target) if suffix == ".jsonl" else table(target)
    values = [row["x"] if suffix == ".jsonl" else json.loads(row["x"]) for row in found]
    assert values == [deep, 1 << 70]


def test_dates_and_decimals_are_plain_text(link: ForeignLink, tmp_path: Path) -> None:
    values = {"day": datetime.date(2026, 1, 2), "cost": Decimal("1.50"), "many": [Decimal("0.1")]}
    parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "a", **values}]), tmp_path / "in.parquet"
    )
    run(spec(tmp_path / "in.parquet", tmp_path / "out.csv"), link, tmp_path)
    (row,) = table(tmp_path / "out.csv")
    assert (row["day"], row["cost"], row["many"]) == ("2026-01-02", "1.50", '["0.1"]')
    run(
        BatchSpec(prompts=[{"prompt": "a", **values}], output_path=str(tmp_path / "list.parquet")),
        link,
        tmp_path / "other",
    )
    (row,) = table(tmp_path / "list.parquet")
    assert (row["day"], row["cost"], row["many"]) == ("2026-01-02", "1.50", '["0.1"]')


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_bytes_become_text(link: ForeignLink, tmp_path: Path, suffix: str) -> None:
    data = pyarrow.array([b"text", b"\xff\xfe"], pyarrow.binary())
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "x": data}), tmp_path / "in.parquet")
    target = tmp_path / f"out{suffix}"
    run(spec(tmp_path / "in.parquet", target, output_format="columns"), link, tmp_path)
    rows = read_rows(target) if suffix == ".jsonl" else table(target)
    assert [row["x"] for row in rows] == ["text", "//4="]


def test_a_damaged_parquet_page(link: ForeignLink, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"prompt": [f"p{i}" * 50 for i in range(500)]}), path)
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    with pytest.raises((BatchFailed, InvalidPrompts), match=r"in\.parquet"):
        run(spec(path, tmp_path / "out.parquet"), link, tmp_path)


def test_an_added_column_in_a_later_row(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b", "error": "old"}])
    with pytest.raises(InvalidPrompts, match=r"has a column error already .*row 2"):
        check_inputs(spec(source, tmp_path / "out.csv"))


@pytest.mark.parametrize(
    ("name", "text"), [("in.txt", "a\n"), ("in.jsonl", '"a"\n'), ("in.jsonl", '{"prompt": "a"}\n')]
)
def test_an_added_column_with_the_name_of_the_prompt(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    one = spec(tmp_path / name, tmp_path / "out.csv", answer_column="prompt")
    with pytest.raises(InvalidPrompts, match=r"has a column prompt already .*row 1"):
        check_inputs(one)


def test_a_long_quoted_field_invents_no_rows(link: ForeignLink, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text('prompt,n\na,1\n"' + "injected,0\n" * 500 + '",2\nb,3\n')
    run(spec(source, tmp_path / "out.csv", max_row_bytes=1024), link, tmp_path)
    rows = table(tmp_path / "out.csv")
    assert [row["n"] for row in rows] == ["1", "2", "3"]
    assert [bool(row["error"]) for row in rows] == [False, True, False]


def test_bad_csv_rows_keep_their_cells(link: ForeignLink, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_bytes(b"prompt,n\na\nb,2,3\ncaf\xe9,4\n")
    run(spec(source, tmp_path / "out.csv"), link, tmp_path)
    rows = table(tmp_path / "out.csv")
    assert [(row["prompt"], row["n"]) for row in rows] == [
        ("a", ""), ("b", "2,3"), ("caf\\xe9", "4"),
    ]  # fmt: skip
    assert all(row["error"] for row in rows)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_no_limit_of_a_row(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"in{suffix}"
    source.write_text("prompt\na\n" if suffix == ".csv" else '{"prompt": "a"}\n')
    check_inputs(spec(source, tmp_path / "out.csv", max_row_bytes=2**64))
