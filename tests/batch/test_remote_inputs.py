"""Input on object storage, which is not read to its end before the batch begins."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

import pytest
from upath import UPath

from airflow_provider_vllm.batch.run import BatchResult, check_inputs, run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed, InvalidPrompts
from tests.batch.helpers import LOG, ForeignLink, to_path

BUCKET = "memory://inputs"
pytestmark = pytest.mark.usefixtures("empty_bucket")


def spec(name: str, data: bytes, **more: Any) -> BatchSpec:
    UPath(f"{BUCKET}/{name}").write_bytes(data)
    target = {"output_path": f"{BUCKET}/out.csv", "max_error_rate": 1}
    return BatchSpec(input_path=f"{BUCKET}/{name}", **{**target, **more})


def run(one: BatchSpec, link: ForeignLink) -> BatchResult:
    return run_batch(one, link, journal_dir=f"{BUCKET}/journal", log=LOG, to_path=to_path)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n\n", "holds no rows"),
        ("header.csv", b"prompt\n", "holds no rows"),
        ("blank.txt.gz", gzip.compress(b"\n", mtime=0), "holds no rows"),
        ("other.csv", b"question\na\n", "no column prompt"),
        ("array.json", b'[\n{"prompt": "a"}\n]\n', "one JSON document over several lines"),
    ],
)
def test_a_file_that_cannot_be_used(name: str, data: bytes, says: str) -> None:
    with pytest.raises(InvalidPrompts, match=says) as caught:
        check_inputs(spec(name, data), to_path=to_path)
    assert f"{BUCKET}/{name}" in str(caught.value)


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.csv.gz", "in.txt.gz"])
def test_a_gzip_file_that_was_cut_off(link: ForeignLink, name: str) -> None:
    """The answers to what could be read are kept, and the file and the line are named."""
    dice = random.Random(1)
    texts = [f"{dice.random()}" for _ in range(4000)]
    form = name.split(".")[1]
    lines = [json.dumps({"prompt": text}) if form == "jsonl" else text for text in texts]
    head = "prompt\n" if form == "csv" else ""
    whole = gzip.compress((head + "\n".join(lines) + "\n").encode())
    to = {"output_path": f"{BUCKET}/out.jsonl"}
    one = spec(name, whole[: len(whole) // 2], **to)
    with pytest.raises(
        BatchFailed, match=rf"{name} cannot be read on after line \d{{4}}: .* are kept"
    ):
        run(one, link)
    result = run(spec(name, whole, **to), link)
    assert result.manifest.rows == result.manifest.ok == 4000
    assert result.manifest.reused > 1000


def test_one_whose_columns_are_looked_through_before() -> None:
    """JSON lines have any columns, so all are read before a table is promised."""
    whole = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % (n * n) for n in range(5000)))
    with pytest.raises(InvalidPrompts, match=r"in\.jsonl\.gz cannot be read on after line"):
        check_inputs(spec("in.jsonl.gz", whole[:-99]), to_path=to_path)


def test_a_quote_that_is_never_closed(link: ForeignLink) -> None:
    data = gzip.compress(b'n,prompt\n1,a\n2,"b\n3,c\n')
    result = run(spec("in.csv", data), link)
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": 2}
    rows = UPath(f"{BUCKET}/out.csv").read_text().splitlines()
    assert [row[:2] for row in rows if row[:1].isdigit()] == ["1,", "2,", "3,"]
