"""Several files of one input: their order, names that are there twice, and those that hold nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from airflow_provider_vllm.batch.check import check_inputs
from airflow_provider_vllm.batch.shards import merge, split
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidPrompts
from tests.batch.helpers import ForeignLink, prompts_of, run


def spec(*paths: Any, **more: Any) -> BatchSpec:
    return BatchSpec(input_path=[str(path) for path in paths], output_path="out.jsonl", **more)


def test_several_files_and_globs_keep_their_order(tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / f"part-{index:02d}.txt").write_text(f"p{index}\nq{index}\n")
    expected = [f"{letter}{index}" for index in range(12) for letter in "pq"]
    assert prompts_of(spec(tmp_path / "part-*.txt")) == expected
    assert prompts_of(spec(tmp_path / "part-01.txt", tmp_path / "part-00.txt"))[:2] == ["p1", "q1"]
    deep = tmp_path / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "part-99.txt").write_text("far\n")
    assert prompts_of(spec(tmp_path / "**" / "part-99.txt")) == ["far"]
    (tmp_path / "odd[1].txt").write_text("literal\n")
    assert prompts_of(spec(tmp_path / "odd[1].txt")) == ["literal"]


def test_a_file_that_is_named_twice_is_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    (tmp_path / "link.txt").symlink_to("a.txt")
    one = spec(tmp_path / "b.txt", tmp_path / "x" / ".." / "*.txt", tmp_path / "b.txt")
    (tmp_path / "x").mkdir()
    assert prompts_of(one) == ["b", "a"]
    (warning,) = caplog.messages
    assert "twice" in warning
    assert [name in warning for name in ("a.txt", "b.txt", "link.txt")] == [False, True, True]
    (tmp_path / "copy.txt").write_text("a\n")
    assert prompts_of(spec(tmp_path / "a.txt", tmp_path / "copy.txt")) == ["a", "a"]


@pytest.mark.parametrize(("source", "output"), [("link", "real"), ("real", "link")])
def test_a_glob_leaves_out_what_the_batch_writes_by_any_name(
    link: ForeignLink, tmp_path: Path, source: str, output: str
) -> None:
    """Through a link to the folder too, and what a try that was killed while it wrote has left."""
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    (real / "in.jsonl").write_text('{"prompt": "a"}\n')
    spec = BatchSpec(
        input_path=str(tmp_path / source / "*.jsonl*"),
        output_path=str(tmp_path / output / "out.jsonl"),
    )
    for left in (".out.jsonl.0123abcd.part", ".out.jsonl.errors.jsonl.0123abcd.part"):
        (real / left).write_text('{"prompt": "half"}\n')
    for _ in range(2):  # and the next try
        manifest = run(spec, link, tmp_path).manifest
        assert (manifest.rows, manifest.ok) == (1, 1)
    assert not list(real.glob(".*.part"))


EMPTY = {
    "jsonl": [b"", b"\n \n", gzip.compress(b"")],
    "txt": [b"", b"\n"],
    "csv": [b"", b"\n", b"\xef\xbb\xbf", gzip.compress(b""), b"prompt,label\n", b"prompt\n\n"],
}


@pytest.mark.parametrize(
    ("kind", "nothing"), [(kind, each) for kind, files in EMPTY.items() for each in files]
)
def test_one_of_several_may_hold_no_row(
    link: ForeignLink,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    nothing: bytes,
) -> None:
    """As the part of a day on which nothing came; the log names it."""
    full = {"jsonl": '{"prompt": "%s"}\n', "txt": "%s\n", "csv": "prompt,label\n%s,1\n"}[kind]
    for name in "ac":
        (tmp_path / f"{name}.{kind}").write_text(full % name)
    (tmp_path / f"b.{kind}").write_bytes(nothing)
    parts = BatchSpec(input_path=str(tmp_path / f"?.{kind}"), output_path=str(tmp_path / "out.csv"))
    assert prompts_of(parts) == ["a", "c"]
    assert run(parts, link, tmp_path).manifest.outcomes == {"ok": 2}
    assert f"b.{kind}" in caplog.text
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[0].endswith("response,error")


def test_a_parquet_part_may_hold_no_row(link: ForeignLink, tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a"], "n": [1]})
    for name, rows in (("a", 1), ("b", 0), ("c", 1)):
        parquet.write_table(table.slice(0, rows), tmp_path / f"{name}.parquet")
    output = str(tmp_path / "out.parquet")
    parts = BatchSpec(input_path=str(tmp_path / "?.parquet"), output_path=output)
    assert run(parts, link, tmp_path).manifest.outcomes == {"ok": 2}
    assert parquet.read_table(output)["n"].to_pylist() == [1, 1]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_without_a_row_takes_part_in_no_shard(
    link: ForeignLink, tmp_path: Path, kind: str
) -> None:
    full = {"jsonl": '{"prompt": "%s"}\n', "csv": "prompt\n%s\n"}[kind]
    for name in "ac":
        (tmp_path / f"{name}.{kind}").write_text(full % name)
    (tmp_path / f"b.{kind}").write_text("prompt\n" if kind == "csv" else "\n")
    shards = split(str(tmp_path / f"?.{kind}"), str(tmp_path / "shards"), shards=2)
    manifests = []
    for number, shard in enumerate(shards):
        one = BatchSpec(**shard, output_path=str(tmp_path / f"out-{number}.jsonl"))
        manifests.append(run(one, link, tmp_path / str(number)).manifest.to_json())
        assert manifests[-1]["outcomes"] == {"ok": 1}
    merge(manifests, str(tmp_path / "merged.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "merged.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == ["row-1", "row-2"]


def test_all_of_them_hold_no_row(tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", b"\n")):
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    with pytest.raises(InvalidPrompts, match=r"b\.jsonl holds no rows: there is nothing to do"):
        check_inputs(spec(tmp_path / "a.jsonl", tmp_path / "b.jsonl"))
    (tmp_path / "b.jsonl").write_bytes(b"")
    with pytest.raises(InvalidPrompts, match=r"a\.jsonl is empty: there is nothing to do"):
        check_inputs(spec(tmp_path / "a.jsonl", tmp_path / "b.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("b.parquet", b"", "is not Parquet"),
        ("b.jsonl.gz", gzip.compress(b"")[:10], "cannot be read to its end"),
        ("b.csv", gzip.compress(b"")[:10], "cannot be read to its end"),
    ],
)
def test_damage_is_not_taken_for_nothing(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidPrompts, match=says):
        check_inputs(spec(tmp_path / "a.jsonl", tmp_path / name))
