"""Input on object storage."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

import pytest
from upath import UPath

from airflow_provider_vllm.batch import extent
from airflow_provider_vllm.batch.run import BatchResult, check_inputs, run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed, InvalidPrompts
from tests.batch.helpers import LOG, ForeignLink, to_path
from tests.fakes.endpoint import ThreadedEndpoint

BUCKET = "memory://inputs"
pytestmark = pytest.mark.usefixtures("empty_bucket")


def spec(name: str, data: bytes, **more: Any) -> BatchSpec:
    UPath(f"{BUCKET}/{name}").write_bytes(data)
    target = {"output_path": f"{BUCKET}/out.csv", "max_error_rate": 1}
    return BatchSpec(input_path=f"{BUCKET}/{name}", **{**target, **more})


def run(one: BatchSpec, link: ForeignLink, **more: Any) -> BatchResult:
    return run_batch(one, link, journal_dir=f"{BUCKET}/journal", log=LOG, to_path=to_path, **more)


FORMS = {
    "in.jsonl": lambda texts: "".join(json.dumps({"prompt": text}) + "\n" for text in texts),
    "in.csv": lambda texts: "prompt\n" + "".join(f"{text}\n" for text in texts),
    "in.txt": lambda texts: "".join(f"{text}\n" for text in texts),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("gz", [False, True])
def test_the_verdict_comes_as_early_as_on_local_files(
    server: ThreadedEndpoint, link: ForeignLink, name: str, gz: bool
) -> None:
    """The rows are counted before the first is sent, so that the rest, which cannot mend it, is not sent."""
    texts = ["[[status 400]]"] * 300 + ["fine"] * 1500
    data = FORMS[name](texts).encode()
    one = spec(
        f"{name}.gz" if gz else name,
        gzip.compress(data) if gz else data,
        output_path=f"{BUCKET}/out.jsonl",
        max_error_rate=0.1,
        concurrency=4,
    )
    with pytest.raises(BatchFailed, match=r"rows failed, more than max_error_rate=0\.1 allows"):
        run(one, link)
    assert 180 < server.behaviour.prompts.total() < 300


def test_progress_knows_how_many_rows_there_are(
    server: ThreadedEndpoint, link: ForeignLink
) -> None:
    server.behaviour.latency = 0.01
    one = spec("in.txt", b"fine\n" * 200, concurrency=4, progress_interval=0.05)
    seen: list[dict[str, Any]] = []
    run(one, link, on_progress=seen.append)
    assert {numbers["total"] for numbers in seen} == {200}
    assert seen[-1]["seconds_left"] is not None


def test_rows_that_cannot_be_sent_are_found_before_a_server_is_asked(link: ForeignLink) -> None:
    lines = b'{"prompt": 5}\n{"prompt": "a"}\n' * 10
    with pytest.raises(
        BatchFailed, match=r"no server was asked; first errors: .*in\.jsonl, line 1: "
    ):
        run(spec("in.jsonl", lines, max_error_rate=0.1), link)
    assert link.connects == 0


def test_counting_that_takes_long_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extent, "TELL_EVERY", 0.0)
    caplog.set_level("INFO")
    check_inputs(spec("in{1}.jsonl", b'{"prompt": "a"}\n' * 100), to_path=to_path)
    assert f"Counting the rows of {BUCKET}/in{{1}}.jsonl: 1,600 bytes so far" in caplog.text
    check_inputs(spec("in.csv", b"prompt\n" + b"a\n" * 100), to_path=to_path)
    assert f"Counting the rows of {BUCKET}/in.csv: 100 rows so far" in caplog.text


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
def test_a_gzip_file_that_is_cut_off(link: ForeignLink, name: str) -> None:
    """Before the batch begins it is refused; later the answers to what could be read are kept."""
    dice = random.Random(1)
    texts = [f"{dice.random()}" for _ in range(4000)]
    form = name.split(".")[1]
    lines = [json.dumps({"prompt": text}) if form == "jsonl" else text for text in texts]
    head = "prompt\n" if form == "csv" else ""
    whole = gzip.compress((head + "\n".join(lines) + "\n").encode())
    to = {"output_path": f"{BUCKET}/out.jsonl"}
    part = whole[: len(whole) // 2]
    with pytest.raises(InvalidPrompts, match=rf"{name}.* cannot be read .*to its end"):
        check_inputs(spec(name, part, **to), to_path=to_path)
    checked = check_inputs(spec(name, whole, **to), to_path=to_path)
    with pytest.raises(
        BatchFailed, match=rf"{name} cannot be read on after line \d{{4}}: .* are kept"
    ):
        run(spec(name, part, **to), link, checked=checked)
    result = run(spec(name, whole, **to), link)
    assert result.manifest.rows == result.manifest.ok == 4000
    assert result.manifest.reused > 1000


def test_a_quote_that_is_never_closed(link: ForeignLink) -> None:
    data = gzip.compress(b'n,prompt\n1,a\n2,"b\n3,c\n')
    result = run(spec("in.csv", data), link)
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": 2}
    rows = UPath(f"{BUCKET}/out.csv").read_text().splitlines()
    assert [row[:2] for row in rows if row[:1].isdigit()] == ["1,", "2,", "3,"]
