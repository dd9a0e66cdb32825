"""Split, run each shard, merge: the same as the whole."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from airflow_provider_vllm.batch.shards import merge, split
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts
from tests.batch.helpers import ForeignLink, batch_row, read_rows, run, write_rows


def run_shards(
    link: ForeignLink, folder: Path, source: Path, shards: int, suffix: str
) -> list[dict[str, Any]]:
    manifests = []
    for index, arguments in enumerate(split(str(source), str(folder / "work"), shards=shards)):
        target = folder / f"out-{index}{suffix}"
        spec = BatchSpec(**arguments, output_path=str(target), max_error_rate=1)
        manifests.append(run(spec, link, folder / str(index)).manifest.to_json())
    return manifests


def rows() -> list[Any]:
    made: list[Any] = [{"prompt": f"p{index}"} for index in range(50)]
    made[9] = b"{broken\n"
    made[10] = b"\n"
    made[25] = batch_row("own", "[[status 400]]")
    made[30] = b"  \n"
    return made


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 50, 80])
def test_shards_of_json_lines(link: ForeignLink, tmp_path: Path, shards: int) -> None:
    source = write_rows(tmp_path / "in.jsonl", rows())
    whole = BatchSpec(
        input_path=str(source), output_path=str(tmp_path / "whole.jsonl"), max_error_rate=1
    )
    expected = run(whole, link, tmp_path / "whole").manifest
    manifests = run_shards(link, tmp_path, source, shards, ".jsonl")
    assert len(manifests) == min(shards, len(manifests))
    merged = merge(manifests, str(tmp_path / "merged.jsonl"))
    assert merged["outcomes"] == expected.outcomes
    assert merged["rows"] == sum(merged["outcomes"].values()) == 50
    assert (tmp_path / "merged.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    ids = [
        [row["custom_id"] for row in read_rows(tmp_path / name)]
        for name in ("merged.jsonl.errors.jsonl", "whole.jsonl.errors.jsonl")
    ]
    assert ids[0] == ids[1]


def test_shards_are_nearly_equal(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(103)])
    made = split(str(source), str(tmp_path / "work"), shards=4)
    sizes = [len(read_rows(Path(shard["input_path"]))) for shard in made]
    assert sizes == [26, 26, 26, 25]
    assert [shard["row_offset"] for shard in made] == [0, 26, 52, 78]


def test_shards_of_csv(link: ForeignLink, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "n"], *([f"p\n{i}", i] for i in range(20))])
    manifests = run_shards(link, tmp_path, source, 3, ".csv")
    merge(manifests, str(tmp_path / "merged.csv"))
    with (tmp_path / "merged.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["n"] for row in found] == [str(i) for i in range(20)]
    assert all(row["response"] for row in found)


@pytest.mark.parametrize("shards", [1, 3, 4])
def test_shards_of_parquet(link: ForeignLink, tmp_path: Path, shards: int) -> None:
    source = tmp_path / "in.parquet"
    prompts = [f"p{index}" for index in range(20)]
    parquet.write_table(pyarrow.table({"prompt": prompts}), source, row_group_size=6)
    manifests = run_shards(link, tmp_path, source, shards, ".parquet")
    assert len(manifests) == shards
    merge(manifests, str(tmp_path / "merged.parquet"))
    found = parquet.read_table(tmp_path / "merged.parquet").to_pylist()
    assert [row["prompt"] for row in found] == prompts
    assert all(row["response"] for row in found)


def test_what_cannot_be_split_or_merged(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(InvalidInput, match="shards"):
        split(str(source), str(tmp_path), shards=0)
    with pytest.raises(InvalidPrompts, match="several formats"):
        split([str(source), str(tmp_path / "in.txt")], str(tmp_path), shards=2)
    with pytest.raises(InvalidInput, match="at least one"):
        merge([], str(tmp_path / "out.jsonl"))
    with pytest.raises(InvalidInput, match="did not succeed"):
        merge([{"output_path": None}], str(tmp_path / "out.jsonl"))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_shards_with_other_columns(link: ForeignLink, tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "a", "n": 1}, {"n": "two", "more": "x", "prompt": "b"}]
    manifests = []
    for index, row in enumerate(rows):
        source = write_rows(tmp_path / f"in-{index}.jsonl", [row])
        spec = BatchSpec(input_path=str(source), output_path=str(tmp_path / f"out-{index}{suffix}"))
        manifests.append(run(spec, link, tmp_path / str(index)).manifest.to_json())
    target = tmp_path / f"merged{suffix}"
    merge(manifests, str(target))
    if suffix == ".parquet":
        found = parquet.read_table(target).to_pylist()
    else:
        with target.open(newline="") as file:
            found = list(csv.DictReader(file))
    assert [(row["prompt"], row["n"], row["more"] or "") for row in found] == [
        ("a", "1", ""),
        ("b", "two", "x"),
    ]
    assert [row["response"].split()[-1] for row in found] == ["a", "b"]


def test_merge_and_an_errors_file_that_is_there(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    manifests = run_shards(link, tmp_path, source, 1, ".jsonl")
    errors = write_rows(tmp_path / "merged.jsonl.errors.jsonl", [{"precious": 1}])
    with pytest.raises(InvalidInput, match="no batch has written it"):
        merge(manifests, str(tmp_path / "merged.jsonl"))
    assert read_rows(errors) == [{"precious": 1}]
    write_rows(errors, [{"custom_id": "row-1", "response": None, "error": {"code": "x"}}])
    merge(manifests, str(tmp_path / "merged.jsonl"))
    assert not errors.exists()


class Fetched(Sequence[dict[str, Any]]):
    """The outputs of a mapped task: each is asked of Airflow whenever it is looked at."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items, self.looks = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return self.items[index]


def test_manifests_are_fetched_once(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    manifests = Fetched(run_shards(link, tmp_path, source, 2, ".jsonl"))
    assert merge(manifests, str(tmp_path / "merged.jsonl"))["rows"] == 2
    assert manifests.looks == len(manifests) + 1  # the one after the last ends it


def test_parquet_files_with_other_columns_are_split(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a"], "n": [1]}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"more": ["x"], "prompt": ["b"]}), tmp_path / "b.parquet")
    (shard,) = split(str(tmp_path / "?.parquet"), str(tmp_path / "work"), shards=1)
    assert parquet.read_table(shard["input_path"]).to_pylist() == [
        {"prompt": "a", "n": 1, "more": None},
        {"prompt": "b", "n": None, "more": "x"},
    ]
