"""Whole batches against the fake endpoint: what goes in and what comes out."""

from __future__ import annotations

import csv
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from airflow_provider_vllm.batch.ahead import Direct
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.sender import Sender
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed, InvalidPrompts, TooManyErrors
from tests.batch.helpers import ForeignLink, batch_row, read_rows, run, until, write_rows
from tests.fakes.endpoint import ThreadedEndpoint


def test_a_list_comes_back_in_its_order(link: ForeignLink, tmp_path: Path) -> None:
    prompts = [f"prompt {index}" for index in range(300)]
    result = run(BatchSpec(prompts=prompts), link, tmp_path)
    assert result.answers is not None
    assert [text.rpartition("user: ")[2] for text in result.answers] == prompts
    assert result.manifest.rows == result.manifest.ok == 300
    assert result.errors == []


def test_every_form_of_a_list_row(link: ForeignLink, tmp_path: Path) -> None:
    rows = [
        "text",
        [{"role": "user", "content": "messages"}],
        {"prompt": "a column", "label": 7},
        {"messages": [{"role": "user", "content": "messages in a column"}]},
        {"prompt": "own parameters", "params": {"temperature": 1.5}},
        batch_row("own-id", "a batch row"),
        batch_row("completion", "another url", url="/v1/completions"),
    ]
    result = run(BatchSpec(prompts=rows), link, tmp_path)
    assert result.manifest.outcomes == {"ok": 7}
    assert result.answers is not None
    assert result.answers[-1].endswith("another url")


def test_results_file_has_the_form_of_openai_batches(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [batch_row(f"id-{i}", f"p{i}") for i in range(20)])
    target = tmp_path / "out.jsonl"
    result = run(BatchSpec(input_path=str(source), output_path=str(target)), link, tmp_path)
    rows = read_rows(target)
    assert [row["custom_id"] for row in rows] == [f"id-{i}" for i in range(20)]
    first = rows[0]
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert first["error"] is None
    assert set(first["response"]) == {"status_code", "request_id", "body"}
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"].endswith("p0")
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest == result.manifest.to_json()
    assert manifest["prompt_tokens"] == 40
    assert manifest["completion_tokens"] == 160
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "journal",
        "out.jsonl",
        "out.jsonl.manifest.json",
    ]


def test_parameters_system_prompt_and_model_reach_the_server(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    server.behaviour.models = ("tiny", "lora")
    spec = BatchSpec(
        prompts=["hello", {"prompt": "warm", "params": {"temperature": 2}}],
        params={"temperature": 0.5, "max_tokens": 8},
        system_prompt="be short",
        model="lora",
    )
    run(spec, link, tmp_path)
    assert set(server.behaviour.prompts) == {
        "system: be short\nuser: hello",
        "system: be short\nuser: warm",
    }
    bodies = {body["messages"][-1]["content"]: body for body in server.behaviour.bodies}
    assert bodies["hello"]["model"] == "lora"
    assert bodies["hello"]["temperature"] == 0.5
    assert bodies["warm"]["temperature"] == 2
    assert bodies["warm"]["max_tokens"] == 8


@pytest.mark.parametrize(
    ("endpoint", "row", "kind"),
    [
        ("completions", "text", str),
        ("embeddings", "text", list),
        ("score", {"text_1": "a", "text_2": "b"}, float),
        ("rerank", {"query": "a", "documents": ["b", "c"]}, list),
        ("classify", "text", str),
        ("pooling", "text", list),
        ("responses", "text", str),
    ],
)
def test_every_endpoint(
    link: ForeignLink, tmp_path: Path, endpoint: str, row: object, kind: type
) -> None:
    result = run(BatchSpec(prompts=[row], endpoint=endpoint), link, tmp_path)
    assert result.answers is not None
    assert isinstance(result.answers[0], kind)


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def test_answers_are_checked_against_the_schema(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    prompts = ['[[say {"age": 3}]]', '[[say {"age": "three"}]]', "[[say not JSON]]"]
    spec = BatchSpec(prompts=prompts, output_schema=SCHEMA, max_error_rate=1)
    result = run(spec, link, tmp_path)
    assert result.manifest.outcomes == {"invalid_output": 2, "ok": 1}
    assert result.answers == ['{"age": 3}', None, None]
    assert result.errors is not None
    assert [error["code"] for error in result.errors] == ["invalid_output"] * 2
    assert [error["text"] for error in result.errors] == ['{"age": "three"}', "not JSON"]
    assert server.behaviour.bodies[0]["response_format"]["json_schema"]["schema"] == SCHEMA


def test_a_pydantic_class_is_a_schema(link: ForeignLink, tmp_path: Path) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        age: int

    prompts = ['[[say {"age": 3}]]', '[[say {"age": "three"}]]']
    spec = BatchSpec(prompts=prompts, output_schema=Person, max_error_rate=1)
    result = run(spec, link, tmp_path)
    assert result.answers == ['{"age": 3}', None]


def test_answers_of_an_earlier_try_are_checked_too(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """A validator that was added leaves the JSON schema, and so the request, as it was."""
    from pydantic import BaseModel, create_model, field_validator

    def adult(cls: type, age: int) -> int:
        if age < 18:
            raise ValueError("not an adult")
        return age

    loose: type[BaseModel] = create_model("Person", age=(int, ...))
    strict: type[BaseModel] = create_model(
        "Person", age=(int, ...), __validators__={"adult": field_validator("age")(adult)}
    )
    prompts = ['[[say {"age": 3}]]', '[[say {"age": 30}]]']
    spec = BatchSpec(prompts=prompts, output_schema=loose, max_error_rate=1, pack=1)
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 2}
    assert run(spec, link, tmp_path).manifest.reused == 2
    result = run(spec.replace(output_schema=strict), link, tmp_path)
    assert result.answers == [None, '{"age": 30}']
    assert result.manifest.reused == 1
    assert server.behaviour.requests == 3


def test_the_raw_text_of_an_invalid_output_is_kept(link: ForeignLink, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "[[say not JSON]]"}])
    spec = BatchSpec(
        input_path=str(source),
        output_path=str(tmp_path / "out.jsonl"),
        output_schema=SCHEMA,
        max_error_rate=1,
    )
    result = run(spec, link, tmp_path)
    (row,) = read_rows(Path(str(result.manifest.errors_path)))
    assert row["response"]["body"]["choices"][0]["message"]["content"] == "not JSON"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_table_has_the_raw_text_too(link: ForeignLink, tmp_path: Path, form: str) -> None:
    """Nobody who works with tables has to look into JSON lines for it."""
    source = tmp_path / "in.csv"
    source.write_text('prompt\n[[say not JSON]]\n"[[say {""age"": 3}]]"\n')
    spec = BatchSpec(
        input_path=str(source),
        output_path=str(tmp_path / f"out.{form}"),
        output_schema=SCHEMA,
        max_error_rate=1,
    )
    run(spec, link, tmp_path)
    if form == "csv":
        with (tmp_path / "out.csv").open(newline="") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
    else:
        rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["response"] or None for row in rows] == [None, '{"age": 3}']
    assert rows[0]["error"].endswith("; the answer was: not JSON")
    assert not rows[1]["error"]


def test_the_log_of_a_batch_that_succeeds_names_the_errors_file(
    link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts: list[Any] = ["fine"] * 20 + ["[[status 400]]"]
    output = str(tmp_path / "out.jsonl")
    manifest = run(BatchSpec(prompts=prompts, output_path=output), link, tmp_path).manifest
    assert manifest.errors_path == f"{output}.errors.jsonl"
    said = (
        "1 of 21 rows failed: row-21: prompts, row 21: HTTP 400: told to answer 400; all of them: "
    )
    assert f"{said}{manifest.errors_path}" in caplog.text
    caplog.clear()
    run(BatchSpec(prompts=prompts), link, tmp_path / "other")
    assert "1 of 21 rows failed: row-21: prompts, row 21: HTTP 400" in caplog.text


def test_the_most_frequent_reason_is_named_first(link: ForeignLink, tmp_path: Path) -> None:
    """However late it comes, and however many other things are wrong."""
    rows: list[Any] = [b"no JSON\n", b"5\n", *({"prompt": "fine"} for _ in range(90))]
    rows += [batch_row(f"q{index}", "x", model="other") for index in range(30)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    spec = BatchSpec(input_path=str(source), output_path=str(tmp_path / "out.jsonl"), pack=1)
    with pytest.raises(TooManyErrors, match="rows failed, more than max_error_rate") as caught:
        run(spec, link, tmp_path)
    text = str(caught.value)
    first = text[text.index("first errors: ") :]
    begins = (
        rf"first errors: \d+ x http_404, as q\d+: {re.escape(str(source))}, line \d+: HTTP 404: "
    )
    assert re.match(begins, first)
    assert f"{source}, line 1: not JSON" in first and f"{source}, line 2: " in first
    assert "correct them, or allow more with max_error_rate or max_errors" in first


def test_transient_failures_are_retried(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    prompts = ["[[once 500]] a", "[[once 503]] b", "[[once 429]] c", "[[reset]] d", "plain"]
    result = run(BatchSpec(prompts=prompts), link, tmp_path)
    assert result.manifest.outcomes == {"ok": 5}
    assert result.manifest.retries >= 4
    assert link.losses == []


def test_wrong_requests_are_not_retried(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    prompts = ["[[status 400]]", "[[status 422]]"]
    result = run(BatchSpec(prompts=prompts, max_error_rate=1, pack=1), link, tmp_path)
    assert result.manifest.outcomes == {"ok": 0, "rejected": 2}
    assert server.behaviour.requests == 2


def test_tries_are_limited(server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path) -> None:
    spec = BatchSpec(prompts=["[[garbage]]", "fine"], max_retries=1, max_error_rate=1)
    result = run(spec, link, tmp_path)
    assert result.manifest.outcomes == {"failed": 1, "ok": 1}
    assert server.behaviour.prompts["user: [[garbage]]"] == 2


def test_a_request_that_hangs_times_out(link: ForeignLink, tmp_path: Path) -> None:
    spec = BatchSpec(
        prompts=["[[hang]]", "fine"], request_timeout=0.4, max_retries=1, max_error_rate=1
    )
    result = run(spec, link, tmp_path)
    assert result.manifest.outcomes == {"failed": 1, "ok": 1}
    assert result.errors is not None
    assert result.errors[0]["code"] == "timeout"


def test_a_wrong_key_fails_at_once(server: ThreadedEndpoint, tmp_path: Path) -> None:
    server.behaviour.api_key = "right"
    spec = BatchSpec(prompts=["a"] * 100)
    with pytest.raises(BatchFailed, match="refuses the key"):
        run(spec, ForeignLink(server.base_url, api_key="wrong"), tmp_path)
    assert server.behaviour.prompts.total() == 0


def test_the_key_stays_out_of_sight(server: ThreadedEndpoint, tmp_path: Path) -> None:
    server.behaviour.api_key = "s3cret"
    link = ForeignLink(server.base_url, api_key="s3cret")
    run(BatchSpec(prompts=["a"], output_path=str(tmp_path / "out.jsonl")), link, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(b"s3cret" in path.read_bytes() for path in files)
    assert "s3cret" not in repr(link.endpoint)


def test_too_many_errors_fail_the_batch_with_its_manifest(
    link: ForeignLink, tmp_path: Path
) -> None:
    prompts = ["[[status 400]]"] * 2 + ["fine"] * 8
    with pytest.raises(BatchFailed, match="2 of 10 rows failed") as caught:
        run(BatchSpec(prompts=prompts), link, tmp_path)
    assert caught.value.manifest is not None
    assert caught.value.manifest["outcomes"] == {"ok": 8, "rejected": 2}
    assert caught.value.manifest["complete"] is False
    assert [error["row"] for error in caught.value.errors or ()] == [0, 1], "which no file holds"


@pytest.mark.parametrize(
    ("prompts", "alike"),
    [
        (["[[status 400]] a", "[[status 400]] b"], True),
        (["[[status 400]] a", "[[status 422]] b"], False),
        (["[[status 400]] a", "fine"], False),
    ],
)
def test_rows_that_all_fail_alike_may_share_the_reason(
    link: ForeignLink, tmp_path: Path, prompts: list[str], alike: bool
) -> None:
    with pytest.raises(TooManyErrors) as caught:
        run(BatchSpec(prompts=prompts), link, tmp_path)
    assert ("what they share (sampling, batch, the model)" in str(caught.value)) is alike
    assert ("allow more with max_error_rate" in str(caught.value)) is not alike
    assert caught.value.is_lasting


def test_a_hopeless_batch_fails_early(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    prompts = [f"[[status 400]] {index}" for index in range(2000)]
    with pytest.raises(BatchFailed, match="max_error_rate"):
        run(BatchSpec(prompts=prompts, concurrency=8, pack=1), link, tmp_path)
    assert server.behaviour.requests < 260


def test_max_errors(link: ForeignLink, tmp_path: Path) -> None:
    prompts = ["[[status 400]]"] * 3 + ["fine"] * 97
    with pytest.raises(BatchFailed, match="max_errors=2"):
        run(BatchSpec(prompts=prompts, max_errors=2), link, tmp_path)


def test_a_failed_batch_keeps_its_answers_for_the_retry(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    prompts = ["[[once 400]] x", "[[once 400]] y", *(f"fine {i}" for i in range(8))]
    with pytest.raises(BatchFailed, match="8 answers are kept"):
        run(BatchSpec(prompts=prompts), link, tmp_path)
    before = server.behaviour.prompts.copy()
    result = run(BatchSpec(prompts=prompts), link, tmp_path)
    assert result.manifest.outcomes == {"ok": 10}
    assert result.manifest.reused == 8
    again = server.behaviour.prompts - before
    assert set(again) == {"user: [[once 400]] x", "user: [[once 400]] y"}


def test_outputs_belong_to_their_input(link: ForeignLink, tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", [{"prompt": "a"}])
    two = write_rows(tmp_path / "two.jsonl", [{"prompt": "b"}])
    target = str(tmp_path / "out.jsonl")
    run(BatchSpec(input_path=str(one), output_path=target), link, tmp_path)
    elsewhere = tmp_path / "other"
    run(BatchSpec(input_path=str(one), output_path=target), link, elsewhere)
    with pytest.raises(InvalidPrompts, match="belongs to another input"):
        run(BatchSpec(input_path=str(two), output_path=target), link, elsewhere / "third")


def test_progress_is_reported_and_renews_the_lease(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    server.behaviour.latency = 0.2
    seen: list[dict[str, object]] = []
    prompts = [f"p{index}" for index in range(12)]
    spec = BatchSpec(prompts=prompts, concurrency=2, progress_interval=0.3)
    run(spec, link, tmp_path, on_progress=seen.append)
    assert link.renewed >= 2
    assert seen[-1]["total"] == 12
    assert seen[-1]["running"] is not None
    assert any(row["server_tokens_per_second"] for row in seen)
    assert [row["done"] for row in seen] == sorted(row["done"] for row in seen)  # type: ignore[type-var]


def test_a_malformed_answer_is_an_error_row_and_harms_no_other(tmp_path: Path) -> None:
    """Status 200 with a choice that is none: never journaled as good."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            message = None if b"odd" in asked else {"content": "fine"}
            body = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        link = ForeignLink(f"http://127.0.0.1:{http.server_port}")
        one = BatchSpec(prompts=["a", "odd", "b"], max_retries=1, max_error_rate=1, pack=1)
        for _ in range(2):  # and a second try does not find it as an answer
            result = run(one, link, tmp_path)
            assert result.answers == ["fine", None, "fine"]
            assert result.manifest.outcomes == {"failed": 1, "ok": 2}
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_a_sender_of_bad_rows_alone_can_be_stopped(
    server: ThreadedEndpoint, tmp_path: Path
) -> None:
    """An input without an end, so that only a stop ends it."""
    spec = BatchSpec(prompts=["a"], max_error_rate=1)
    journal = Journal(tmp_path / "journal")
    journal.open()
    endless = Direct(itertools.repeat(("in.jsonl", 1, b"no JSON")))
    endpoint = Endpoint(server.base_url, "tiny")
    sender = Sender(spec, endless, RowMaker(spec, "tiny"), journal, None, endpoint, total=1 << 40)
    sender.start()
    until(lambda: sender.stats.done > 2000)
    sender.stop(timeout=10)
    journal.close()
    assert not sender.is_alive()
