"""What is found wrong before any server is started."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.run import check_inputs
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts

NOBODY = 65534


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    return path


@contextmanager
def without_power(folder: Path) -> Iterator[None]:
    """As an ordinary user, since root may read and write everything."""
    root = os.geteuid() == 0
    for parent in (folder, *folder.parents):
        if root and parent != Path("/") and parent.owner() == "root" and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def spec(source: Any, target: Any, **more: Any) -> BatchSpec:
    return BatchSpec(input_path=str(source), output_path=str(target), **more)


def test_a_good_one(source: Path, tmp_path: Path) -> None:
    assert check_inputs(spec(source, tmp_path / "out.jsonl")).extent.rows == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n\n  \n", "holds no rows"),
        ("bom.jsonl", b"\xef\xbb\xbf", "holds no rows"),
        ("header.csv", b"prompt\n", "holds no rows"),
        ("twice.csv", b"prompt,prompt\na,b\n", "header"),
        ("no.parquet", b"not parquet at all", "is not Parquet"),
        ("broken.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 100)[:-10], "cannot be read to its end"),
        ("utf-16.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "is UTF-16; convert it"),
        ("utf-16.txt", "a\n".encode("utf-16"), "is UTF-16; convert it"),
        ("zip.jsonl", b"PK\x03\x04" + bytes(50), "is a zip file, not jsonl"),
        ("zstd.csv", b"\x28\xb5\x2f\xfd" + bytes(50), "is compressed by zstd, not csv"),
        ("twice.txt.gz", gzip.compress(gzip.compress(b"a\n")), "is gzipped twice, not text"),
        ("array.json", b'[\n  {"prompt": "a"}\n]\n', "one JSON document over several lines"),
        ("open.csv", b'prompt,"label\na,b\n', "line 1: not CSV: the quote that opens field 2 is not"),
        ("semicolon.csv", b"id;prompt\n1;a\n", "no column prompt .* separated by ';': use commas"),
        ("what.xyz", b"a\n", "suffix says no format"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidPrompts, match=says) as caught:
        check_inputs(spec(tmp_path / name, tmp_path / "out.jsonl"))
    assert name in str(caught.value)


def test_missing_file_directory_and_glob_without_a_hit(tmp_path: Path) -> None:
    with pytest.raises(InvalidPrompts, match="does not exist"):
        check_inputs(spec(tmp_path / "no.jsonl", tmp_path / "out.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InvalidPrompts, match="is a directory"):
        check_inputs(spec(tmp_path / "folder.jsonl", tmp_path / "out.jsonl"))
    with pytest.raises(InvalidPrompts, match="no file matches"):
        check_inputs(spec(tmp_path / "no*.jsonl", tmp_path / "out.jsonl"))


def test_parameters_that_are_no_columns(tmp_path: Path) -> None:
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_text("prompt,temperature\na,1\n")
    two.write_text("prompt,seed\na,1\n")
    both = [str(one), str(two)]
    check_inputs(
        BatchSpec(input_path=both, output_path=str(tmp_path / "o.csv"), param_columns=["seed"])
    )
    with pytest.raises(InvalidPrompts, match="no column 'heat'; its columns are 'prompt', 'temp"):
        check_inputs(spec(one, tmp_path / "o.csv", param_columns=["temperature", "heat"]))


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.jsonl")
    for path in (tmp_path / "in.jsonl", Path("/dev/null")):
        with pytest.raises(InvalidPrompts, match="is a pipe or a device"):
            check_inputs(spec(path, tmp_path / "out.jsonl", input_format="jsonl"))


def test_a_directory_of_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "in.parquet").mkdir()
    with pytest.raises(InvalidPrompts, match=r"for example \S+/in\.parquet/\*\.parquet$"):
        check_inputs(spec(tmp_path / "in.parquet", tmp_path / "out.jsonl"))


def test_no_permission_to_read(source: Path, tmp_path: Path) -> None:
    source.chmod(0)
    with without_power(tmp_path), pytest.raises(InvalidPrompts, match="cannot be read"):
        check_inputs(spec(source, tmp_path / "out.jsonl"))


def test_output_directory_missing_or_read_only(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidPrompts, match="does not exist"):
        check_inputs(spec(source, tmp_path / "no" / "out.jsonl"))
    source.chmod(0o644)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    with without_power(tmp_path), pytest.raises(InvalidPrompts, match="no permission to write"):
        check_inputs(spec(source, closed / "out.jsonl"))


def test_output_is_a_directory(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(InvalidPrompts, match="is a directory"):
        check_inputs(spec(source, tmp_path / "out.jsonl"))


def test_output_is_the_input(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidPrompts, match="is the input"):
        spec(source, source)
    (tmp_path / "link.jsonl").symlink_to(source)
    with pytest.raises(InvalidPrompts, match="is the input"):
        check_inputs(spec(source, tmp_path / "link.jsonl"))
    with pytest.raises(InvalidPrompts, match="errors_path is the input"):
        check_inputs(spec(source, tmp_path / "out.jsonl", errors_path=str(source)))


def test_output_of_somebody_else(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("precious\n")
    with pytest.raises(InvalidPrompts, match="has no manifest that says whose it is"):
        check_inputs(spec(source, tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"


def test_added_column_that_exists(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt,response\na,b\n")
    with pytest.raises(InvalidPrompts, match="has a column response already"):
        check_inputs(spec(tmp_path / "in.csv", tmp_path / "out.csv"))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("no column", "names no column"),
        ("{a.b}", "not a column name"),
        ("{}", "not a column name"),
        ("{open", "braces"),
    ],
)
def test_templates(template: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_inputs(BatchSpec(prompts=[{"a": "b"}], prompt_template=template))


def test_a_schema_that_is_none() -> None:
    with pytest.raises(InvalidInput, match="not a JSON schema"):
        check_inputs(BatchSpec(prompts=["a"], output_schema={"type": "nonsense"}))
