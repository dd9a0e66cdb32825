"""Parquet: damage is the fault of its row group only, and odd values harm no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from airflow_provider_vllm.batch.parquet_rows import parquet_parts, parquet_rows
from airflow_provider_vllm.batch.pieces import pieces
from airflow_provider_vllm.batch.run import check_inputs
from airflow_provider_vllm.batch.shards import split
from airflow_provider_vllm.batch.source import Source
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidPrompts
from tests.batch.helpers import ForeignLink, prompts_of, read_rows, run

ROWS, GROUP = 300, 100


def spec(folder: Path, target: str = "out.parquet") -> BatchSpec:
    return BatchSpec(
        input_path=str(folder / "in.parquet"), output_path=str(folder / target), max_error_rate=1
    )


def damaged(folder: Path, *groups: int, nullable: bool = True) -> None:
    """300 rows in three row groups; the pages of some are overwritten in their middle."""
    path = folder / "in.parquet"
    field = pyarrow.field("prompt", pyarrow.string(), nullable=nullable)
    texts = pyarrow.array([f"p{index} " * 40 for index in range(ROWS)])
    table = pyarrow.table([texts], schema=pyarrow.schema([field]))
    parquet.write_table(table, path, row_group_size=GROUP, use_dictionary=False)
    data = bytearray(path.read_bytes())
    metadata = parquet.ParquetFile(path).metadata
    for group in groups:
        column = metadata.row_group(group).column(0)
        middle = column.data_page_offset + column.total_compressed_size // 2
        data[middle : middle + 100] = b"\xff" * 100
    path.write_bytes(data)


@pytest.mark.parametrize("target", ["out.jsonl", "out.csv", "out.parquet"])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_damaged_row_group(link: ForeignLink, tmp_path: Path, target: str, group: int) -> None:
    damaged(tmp_path, group)
    result = run(spec(tmp_path, target), link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": GROUP, "ok": ROWS - GROUP}
    errors = read_rows(Path(str(result.manifest.errors_path)))
    assert [row["error"]["line"] for row in errors] == [
        *range(group * GROUP + 1, group * GROUP + GROUP + 1)
    ]
    assert errors[0]["error"]["code"] == "damaged"
    assert (
        f"in.parquet, row {group * GROUP + 1}: row group {group + 1} of 3"
        in errors[0]["error"]["message"]
    )
    if target == "out.parquet":
        rows = parquet.read_table(tmp_path / target).to_pylist()
        bad = [index for index, row in enumerate(rows) if row["prompt"] is None]
        assert bad == [index for index, row in enumerate(rows) if row["error"]]
        assert bad == [*range(group * GROUP, group * GROUP + GROUP)]


def test_every_row_group_is_damaged(tmp_path: Path) -> None:
    damaged(tmp_path, 0, 1, 2)
    with pytest.raises(InvalidPrompts, match=r"in\.parquet: row group 1 of 3 is damaged"):
        check_inputs(spec(tmp_path))


def test_damage_in_a_column_that_knows_no_null(link: ForeignLink, tmp_path: Path) -> None:
    damaged(tmp_path, 1, nullable=False)
    run(spec(tmp_path), link, tmp_path)
    assert parquet.read_table(tmp_path / "out.parquet").column("prompt").null_count == GROUP


@pytest.mark.parametrize("null", [True, False])
def test_shards_of_a_damaged_file(
    tmp_path: Path, null: bool, caplog: pytest.LogCaptureFixture
) -> None:
    damaged(tmp_path, 1, nullable=null)
    shards = split(str(tmp_path / "in.parquet"), str(tmp_path / "work"), shards=3)
    nulls = [
        parquet.read_table(shard["input_path"]).column("prompt").null_count for shard in shards
    ]
    assert nulls == [0, GROUP, 0]
    assert "in.parquet: row group 2 of 3 is damaged" in caplog.text


@pytest.mark.parametrize(
    "array",
    [
        pyarrow.array([1, 2000], pyarrow.timestamp("ns")),
        pyarrow.array([1, 2**62], pyarrow.timestamp("us")),
        pyarrow.array([1, None], pyarrow.timestamp("us", tz="Mars/Olympus")),
        pyarrow.array([1, None], pyarrow.duration("ns")),
        pyarrow.array([[1], None], pyarrow.list_(pyarrow.timestamp("ns"))),
        pyarrow.array([b"\xff", None], pyarrow.binary()),
        pyarrow.array([[("k", 1)], None], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        pyarrow.array(["x", None]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
@pytest.mark.parametrize("target", ["out.jsonl", "out.csv", "out.parquet"])
def test_a_column_that_python_cannot_hold(
    link: ForeignLink, tmp_path: Path, array: Any, target: str
) -> None:
    table = pyarrow.table({"prompt": ["a", "b"], "odd": array})
    parquet.write_table(table, tmp_path / "in.parquet")
    one = spec(tmp_path, target).replace(output_format="columns")
    assert run(one, link, tmp_path).manifest.outcomes == {"ok": 2}
    if target == "out.parquet":
        out = parquet.read_table(tmp_path / target)
        assert (
            out.schema.field("odd").type
            == parquet.read_schema(tmp_path / "in.parquet").field("odd").type
        )
        assert out.column("odd").cast(array.type) == table.column("odd")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1_500_000_001, "ns", "0:00:01.500000001"),
        (2_000_000_000, "ns", "0:00:02"),
        (1, "ns", "0:00:00.000000001"),
        (86_400_000_000_001, "ns", "1 day, 0:00:00.000000001"),
        (1 << 62, "s", f"{1 << 62} s"),
    ],
)
def test_a_duration_is_text_that_says_how_long(
    tmp_path: Path, value: int, unit: str, text: str
) -> None:
    span = pyarrow.array([value], pyarrow.duration(unit))
    parquet.write_table(pyarrow.table({"span": span}), tmp_path / "in.parquet")
    asked = BatchSpec(
        input_path=str(tmp_path / "in.parquet"),
        output_path=str(tmp_path / "out.jsonl"),
        prompt_template="{span}",
    )
    assert prompts_of(asked) == [text]


def test_large_rows_are_read_and_written_a_few_at_a_time(link: ForeignLink, tmp_path: Path) -> None:
    texts = [f"{index}" + "x" * (1 << 20) for index in range(24)]
    parquet.write_table(
        pyarrow.table({"prompt": texts}), tmp_path / "in.parquet", compression="none"
    )
    source = Source("in", tmp_path / "in.parquet", "parquet", False)
    assert max(batch.nbytes for batch in parquet_parts(source)) < 20 << 20
    rows = [{"prompt": text} for text in texts]
    run(BatchSpec(prompts=rows, output_path=str(tmp_path / "out.parquet")), link, tmp_path)
    out = parquet.ParquetFile(tmp_path / "out.parquet").metadata
    assert [out.row_group(group).num_rows for group in range(out.num_row_groups)] == [16, 8]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    both = pyarrow.Table.from_arrays([["a"], ["b"]], names=["prompt", "prompt"])
    parquet.write_table(both, tmp_path / "in.parquet")
    for target in ("out.jsonl", "out.parquet"):
        with pytest.raises(InvalidPrompts, match="two columns have one name: prompt"):
            check_inputs(spec(tmp_path, target))


def test_what_python_cannot_hold_costs_nothing_beside_it(tmp_path: Path) -> None:
    """A nanosecond within a chat message, and a time that is the same text whatever its neighbours are."""
    chat = pyarrow.struct(
        [("role", pyarrow.string()), ("content", pyarrow.string()), ("at", pyarrow.timestamp("ns"))]
    )
    said = [{"role": "user", "content": "hello", "at": 1}]
    whole = 1_000_000_000_000_000_000
    tables = [
        pyarrow.table(
            {
                "messages": pyarrow.array([said, said], pyarrow.list_(chat)),
                "pairs": pyarrow.array([[("k", 1)], None], pyarrow.map_(pyarrow.string(), pyarrow.timestamp("ns"))),
                "at": pyarrow.array([whole, second], pyarrow.timestamp("ns")),
            }
        )
        for second in (whole, whole + 1)
    ]  # fmt: skip
    found: list[Any] = []
    for index, table in enumerate(tables):
        parquet.write_table(table, tmp_path / f"{index}.parquet")
        source = Source(str(index), tmp_path / f"{index}.parquet", "parquet", False)
        found.append(list(parquet_rows(source)))
    assert found[1][0]["messages"] == [
        {"role": "user", "content": "hello", "at": "1970-01-01 00:00:00.000000001"}
    ]
    assert found[1][0]["pairs"] == [("k", "1970-01-01 00:00:00.000000001")]
    assert str(found[0][0]["at"]) == str(found[1][0]["at"]) == "2001-09-09 01:46:40"
    assert str(found[1][1]["at"]) == "2001-09-09 01:46:40.000000001"


def test_a_shard_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not held in memory whole."""
    monkeypatch.setattr("airflow_provider_vllm.batch.pieces.BATCH", 1 << 16)
    texts = [f"{index} {'x' * 100}" for index in range(20_000)]
    table = pyarrow.table({"prompt": texts}).replace_schema_metadata({"k": "v"})
    parquet.write_table(table, tmp_path / "in.parquet")
    source = Source("in.parquet", tmp_path / "in.parquet", "parquet", False)
    sizes = [
        [len(block or b"") for block in blocks] for _, blocks in pieces("parquet", (source,), 7000)
    ]
    assert [len(each) > 5 for each in sizes] == [True, True, True]
    assert max(map(max, sizes)) < 1 << 17
    shards = split(str(tmp_path / "in.parquet"), str(tmp_path / "work"), shards=3)
    read = [parquet.read_table(shard["input_path"]) for shard in shards]
    assert [each.num_rows for each in read] == [6667, 6667, 6666]
    assert pyarrow.concat_tables(read).column("prompt").to_pylist() == texts
    assert read[2].schema.metadata[b"k"] == b"v"
