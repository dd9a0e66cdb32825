"""Each kind of bad row among good ones: one error row that names file and line, no harm to the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import ForeignLink, batch_row, read_rows, run, write_rows
from tests.fakes.endpoint import ThreadedEndpoint

GOOD = 9
DEEP = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}\n"


def changed(**fields: Any) -> dict[str, Any]:
    return {**batch_row("bad", "hello"), **fields}


def without(name: str) -> dict[str, Any]:
    row = batch_row("bad", "hello")
    del row[name]
    return row


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# name, the row, outcome, code, field
NEVER_SENT = [
    ("not JSON", b"{not json\n", "invalid_json", None),
    ("half a row", json.dumps(batch_row("bad", "x")).encode()[:-9] + b"\n", "invalid_json", None),
    ("not an object", b"17\n", "invalid_prompt", "prompt"),
    ("null", b"null\n", "invalid_prompt", "prompt"),
    ("empty object", {}, "missing_column", "prompt"),
    ("no custom_id", without("custom_id"), "invalid_custom_id", "custom_id"),
    ("custom_id not text", changed(custom_id=7), "invalid_custom_id", "custom_id"),
    ("duplicate custom_id", batch_row("good-0", "again"), "duplicate_custom_id", "custom_id"),
    ("wrong url", changed(url="/v1/wrong"), "invalid_url", "url"),
    ("url not text", changed(url=["/v1"]), "invalid_url", "url"),
    ("wrong method", changed(method="GET"), "invalid_method", "method"),
    ("no body", without("body"), "invalid_row", "body"),
    ("body not an object", changed(body="x"), "invalid_body", "body"),
    ("stream", batch_row("bad", "x", stream=True), "stream", "body.stream"),
    ("huge line", b'{"prompt": "' + b"x" * 10_000_000 + b'"}\n', "row_too_long", None),
    ("empty line", b"\n", "empty_row", None),
    ("line of spaces", b"  \t \n", "empty_row", None),
    ("BOM in the middle", b"\xef\xbb\xbf" + b'{"prompt": "x"}\n', "invalid_json", None),
    ("NUL", b'{"prompt": "a\x00b"}\n', "invalid_json", None),
    ("invalid UTF-8", b'{"prompt": "\xff\xfe"}\n', "invalid_json", None),
    ("lone surrogate", b'{"prompt": "\\ud800"}\n', "invalid_json", None),
    ("deep nesting", DEEP, "invalid_json", None),
    ("empty messages", batch_row("bad", "x") | {"body": {"messages": []}}, "invalid_messages", "messages"),
    ("messages not a list", changed(body={"messages": "x"}), "invalid_messages", "messages"),
    ("message not an object", changed(body={"messages": ["x"]}), "invalid_messages", "messages"),
    ("message without role", changed(body={"messages": [{"content": "x"}]}), "invalid_messages", "messages"),
    ("unknown role", changed(body={"messages": [{"role": "alien", "content": "x"}]}), "invalid_messages", "messages"),
    ("null prompt", {"prompt": None}, "null_prompt", "prompt"),
    ("number as prompt", {"prompt": 5}, "invalid_prompt", "prompt"),
]  # fmt: skip
REFUSED = [
    ("too long", batch_row("bad", "word " * 200), 400),
    ("unknown model", batch_row("bad", "x", model="nobody"), 404),
    ("negative temperature", batch_row("bad", "x", temperature=-1), 400),
    ("text as number", batch_row("bad", "x", temperature="hot"), 400),
]


def batch(tmp_path: Path, bad: Any, *, last: bool = False) -> BatchSpec:
    """Nine good rows with the bad one in the middle, or at the end."""
    good = [batch_row(f"good-{index}", f"prompt {index}") for index in range(GOOD)]
    rows = [*good, bad] if last else [*good[:4], bad, *good[4:]]
    source = write_rows(tmp_path / "in.jsonl", rows)
    return BatchSpec(input_path=str(source), output_path=str(tmp_path / "out.jsonl"))


def good_ids(tmp_path: Path) -> list[str]:
    return [row["custom_id"] for row in read_rows(tmp_path / "out.jsonl")]


@pytest.mark.parametrize(
    ("bad", "code", "field"), [row[1:] for row in NEVER_SENT], ids=[row[0] for row in NEVER_SENT]
)
def test_a_row_that_cannot_be_sent(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, bad: Any, code: str, field: Any
) -> None:
    result = run(batch(tmp_path, bad), link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": GOOD}
    assert good_ids(tmp_path) == [f"good-{index}" for index in range(GOOD)]
    (error,) = read_rows(Path(str(result.manifest.errors_path)))
    assert error["response"] is None
    assert error["error"]["code"] == code
    assert error["error"]["file"] == str(tmp_path / "in.jsonl")
    assert error["error"]["line"] == 5
    assert error["error"].get("field") == field
    assert "line 5" in error["error"]["message"]
    assert server.behaviour.prompts.total() == GOOD


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v2/score", {"queries": "a", "documents": ["b"]}),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b", "c"]}),
    ],
)
def test_urls_as_run_batch_takes_them(
    link: ForeignLink, tmp_path: Path, url: str, body: dict[str, Any]
) -> None:
    """vLLM's own looks at the end of these alone."""
    row = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "tiny", **body}}
    source = write_rows(tmp_path / "in.jsonl", [row])
    run(BatchSpec(input_path=str(source), output_path=str(tmp_path / "out.jsonl")), link, tmp_path)
    (answer,) = read_rows(tmp_path / "out.jsonl")
    assert answer["response"]["status_code"] == 200


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize(("bad", "status"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_row_that_the_server_refuses(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, bad: Any, status: int, pack: int
) -> None:
    server.behaviour.max_words = 100
    result = run(batch(tmp_path, bad).replace(pack=pack), link, tmp_path)
    assert result.manifest.outcomes == {"ok": GOOD, "rejected": 1}
    assert good_ids(tmp_path) == [f"good-{index}" for index in range(GOOD)]
    (error,) = read_rows(Path(str(result.manifest.errors_path)))
    assert error["custom_id"] == "bad"
    assert error["response"]["status_code"] == status
    assert error["response"]["body"]["error"]["message"]
    assert error["error"]["code"] == f"http_{status}"
    assert (error["error"]["file"], error["error"]["line"]) == (str(tmp_path / "in.jsonl"), 5)


@pytest.mark.parametrize(
    "rows",
    [
        b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n',
        b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n',
        b'{"prompt": "a"}\n{"prompt": "b"}',
        b'{"prompt": "a"}\n{"prompt": "b"}\n\n\r\n  \n',
        b'  {"prompt": "a"}\t\n{"prompt": "b"}\n',
        b'{"prompt": "a\\u0000b"}\n"a string"\n',
    ],
    ids=["BOM", "CRLF", "no last newline", "blank end", "spaces", "escaped NUL"],
)
def test_what_only_looks_bad(link: ForeignLink, tmp_path: Path, rows: bytes) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(rows)
    spec = BatchSpec(input_path=str(source), output_path=str(tmp_path / "out.jsonl"))
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 2}


def test_a_torn_last_row(link: ForeignLink, tmp_path: Path) -> None:
    result = run(batch(tmp_path, b'{"custom_id": "bad", "bo', last=True), link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": GOOD}


@pytest.mark.parametrize(
    "bad",
    [None, 3, "", [], ["x"], {"prompt": "\ud800"}, "\ud800", {"prompt": float("nan")}, {1: 2}, object(),
     nested(5000), {"prompt": nested(5000)}, {"prompt": "a", "params": {"stop": nested(5000)}}],
    ids=["null", "number", "empty", "no messages", "no message", "surrogate", "surrogate text",
         "nan", "number key", "object", "deep", "deep prompt", "deep parameter"],
)  # fmt: skip
def test_a_bad_item_of_a_list(link: ForeignLink, tmp_path: Path, bad: Any) -> None:
    prompts = [f"p{index}" for index in range(GOOD)]
    result = run(BatchSpec(prompts=[*prompts[:4], bad, *prompts[4:]]), link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": GOOD}
    assert result.answers is not None
    assert result.errors is not None
    assert result.answers[4] is None
    assert result.errors[0]["row"] == 4
    assert result.errors[0]["line"] == 5


LISTED = [row for row in NEVER_SENT if not isinstance(row[1], bytes)]


@pytest.mark.parametrize(
    ("bad", "code", "field"), [row[1:] for row in LISTED], ids=[row[0] for row in LISTED]
)
def test_the_same_rows_of_a_list(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, bad: Any, code: str, field: Any
) -> None:
    rows: list[Any] = [batch_row(f"good-{index}", f"prompt {index}") for index in range(GOOD)]
    result = run(BatchSpec(prompts=[*rows[:4], bad, *rows[4:]]), link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": GOOD}
    assert result.errors is not None
    (error,) = result.errors
    assert (error["row"], error["code"], error.get("field")) == (4, code, field)
    assert error["message"].startswith("prompts, row 5: ")
    assert server.behaviour.prompts.total() == GOOD


@pytest.mark.parametrize(("bad", "status"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_row_of_a_list_that_the_server_refuses(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, bad: Any, status: int
) -> None:
    server.behaviour.max_words = 100
    result = run(BatchSpec(prompts=[*["p"] * GOOD, bad]), link, tmp_path)
    assert result.manifest.outcomes == {"ok": GOOD, "rejected": 1}
    assert result.errors is not None
    assert [(e["row"], e["code"]) for e in result.errors] == [(GOOD, f"http_{status}")]


def test_ragged_csv(link: ForeignLink, tmp_path: Path) -> None:
    lines = ["prompt,label", *(f"p{index},x" for index in range(GOOD)), "short", "a,b,c"]
    (tmp_path / "in.csv").write_text("\n".join(lines) + "\n")
    spec = BatchSpec(
        input_path=str(tmp_path / "in.csv"),
        output_path=str(tmp_path / "out.csv"),
        max_error_rate=0.5,
    )
    result = run(spec, link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": 2, "ok": GOOD}
    errors = [row["error"] for row in read_rows(Path(str(result.manifest.errors_path)))]
    assert [(error["code"], error["line"]) for error in errors] == [
        ("ragged_row", 11),
        ("ragged_row", 12),
    ]


def test_csv_that_is_not_utf8(link: ForeignLink, tmp_path: Path) -> None:
    rows = b"prompt\n" + b"".join(b"p%d\n" % index for index in range(GOOD)) + b"\xff\n"
    (tmp_path / "in.csv").write_bytes(rows)
    spec = BatchSpec(input_path=str(tmp_path / "in.csv"), output_path=str(tmp_path / "out.jsonl"))
    result = run(spec, link, tmp_path)
    (row,) = read_rows(Path(str(result.manifest.errors_path)))
    assert row["error"]["code"] == "invalid_utf8"
    assert row["error"]["line"] == 11


def test_parquet_with_nulls(link: ForeignLink, tmp_path: Path) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    prompts = ["p0", None, *(f"p{index}" for index in range(1, GOOD))]
    parquet.write_table(pyarrow.table({"prompt": prompts}), tmp_path / "in.parquet")
    spec = BatchSpec(
        input_path=str(tmp_path / "in.parquet"), output_path=str(tmp_path / "out.parquet")
    )
    result = run(spec, link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": GOOD}
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["prompt"] for row in table] == prompts
    assert [row["response"] is None for row in table] == [prompt is None for prompt in prompts]
    assert "null" in table[1]["error"]


class Stubborn:
    """No JSON, and no pleasant object either."""

    def __repr__(self) -> str:
        raise ValueError("no name")


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": "x", "params": [([], 1)]},
        {"prompt": "x", "custom_id": 10**5000},
        {"prompt": "x", "params": {"logit_bias": {"5": float("inf")}}},
        batch_row("bad", "x", temperature=float("nan")),
        {"prompt": "x", "params": {"seed": Stubborn()}},
        Stubborn(),
    ],
    ids=["pairs", "a custom id without end", "infinite", "nan", "an odd value", "an odd object"],
)
def test_an_odd_object_of_a_list_is_one_bad_row(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, bad: Any
) -> None:
    """What a Python list may hold, and no file: never sent as something else, such as null."""
    prompts = [*(f"p{index}" for index in range(10)), bad]
    spec = BatchSpec(prompts=prompts, max_error_rate=0.1)
    manifest = run(spec, link, tmp_path).manifest
    assert manifest.outcomes == {"invalid_input": 1, "ok": 10}
    assert server.behaviour.prompts.total() == 10
