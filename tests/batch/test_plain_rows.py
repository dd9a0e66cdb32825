"""Plain requests of a batch file, read the short way: the same rows as the general reading makes."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest

from airflow_provider_vllm.batch import plain_rows, rows
from airflow_provider_vllm.batch.api import CHAT, COMPLETIONS
from airflow_provider_vllm.batch.parameters import KNOWN
from airflow_provider_vllm.batch.plain_rows import plain_row
from airflow_provider_vllm.batch.row import BadRow, Row
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.spec import BatchSpec

HELLO = [{"role": "user", "content": "Héllo \u0000 \\ / 😀"}]
PLAIN = {"model": "m", "messages": HELLO, "max_tokens": 8}


def line(body: Any, url: Any = CHAT, **more: Any) -> bytes:
    return orjson.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body, **more})


def made(text: bytes, *, pack: bool = False) -> Row | BadRow:
    spec = BatchSpec(input_path="in.jsonl", output_path="out.jsonl")
    return RowMaker(spec, "m", pack=pack).make([("in.jsonl", 1, text)])[0]


def made_generally(text: bytes, monkeypatch: pytest.MonkeyPatch, *, pack: bool = False) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(rows, "plain_row", lambda _: None)
        return made(text, pack=pack)


def said(row: Row | BadRow) -> Any:
    """What must not depend on how a row was read."""
    if isinstance(row, BadRow):
        return row
    return row.custom_id, row.url, orjson.loads(row.body), row.prompt, bool(row.params)


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        (line(PLAIN), True),
        (line({**PLAIN, "temperature": 1, "top_p": -0.0, "min_p": 1e-7, "seed": -5, "n": 2}), True),
        (line({**PLAIN, "stop": "x"}), True),
        (line({**PLAIN, "stop": ["x", ""], "user": "", "max_completion_tokens": 0}), True),
        (line({"model": "", "messages": [*HELLO, {"role": "assistant", "content": ""}]}), True),
        (line({"model": "m", "prompt": "x"}, COMPLETIONS), True),
        (b' { "body" : {"model":"m","prompt":"\\u00e9\\/"},"url":"/v1/completions","custom_id":"b"} ', True),
        (b'{"custom_id":"a","url":"/v1/completions","body":{"model":"m","n":1,"prompt":"x","n":2}}', True),
        (line({**PLAIN, "temperature": None}), False),
        (line({**PLAIN, "temperature": "1"}), False),
        (line({**PLAIN, "temperature": True}), False),
        (line({**PLAIN, "max_tokens": 1.5}), False),
        (line({**PLAIN, "stream": False}), False),
        (line({**PLAIN, "stream": True}), False),
        (line({**PLAIN, "max_token": 8}), False),
        (line({**PLAIN, "messages": []}), False),
        (line({**PLAIN, "messages": [{"role": "tool", "content": "x"}]}), False),
        (line({**PLAIN, "messages": [{"role": "wizard", "content": "x"}]}), False),
        (line({**PLAIN, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}), False),
        (line({**PLAIN, "messages": [{"role": "user", "content": "x", "name": "y"}]}), False),
        (line({"messages": HELLO}), False),
        (line({"model": "m", "prompt": ""}, COMPLETIONS), False),
        (line({"model": "m", "prompt": ["x"]}, COMPLETIONS), False),
        (line(PLAIN, "/v1/embeddings"), False),
        (line(PLAIN, "/v1/unknown"), False),
        (line(PLAIN, method="GET"), False),
        (line(PLAIN, custom_id=""), False),
        (line(PLAIN, custom_id=5), False),
        (line(PLAIN, extra=1), False),
        (line(PLAIN).replace(b'"max_tokens":8', b'"seed":9223372036854775808'), False),
        (line(PLAIN).replace(b'"max_tokens":8', b'"top_p":1e400'), False),
        (line(PLAIN).replace(b'"max_tokens":8', b'"top_p":NaN'), False),
        (line(PLAIN).replace(b'/ ', b'\\ud800 '), False),
        (line(PLAIN).replace(b'/ ', b'\xff '), False),
        (line(PLAIN).replace(b'/ ', b'\xed\xa0\x80 '), False),
        (line(PLAIN).replace(b'"a"', b'"\\udc00"'), False),
        (line(PLAIN) + b",", False),
        (line(PLAIN)[:-1], False),
        (b'{"custom_id":"a","url":"/v1/completions","body":' + b"[" * 100_000, False),
        (b"[]", False),
        (b"", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pack", [False, True])
def test_a_plain_row_is_made_as_any_other(
    text: bytes, is_plain: bool, pack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (plain_row(text) is not None) is is_plain
    assert said(made(text, pack=pack)) == said(made_generally(text, monkeypatch, pack=pack))


@pytest.mark.parametrize("seed", range(20))
def test_a_broken_plain_row_is_as_bad_as_any_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    start = line({**PLAIN, "temperature": 0.5, "stop": ["x"]})
    outcomes = set()
    for _ in range(500):
        text = bytearray(start)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(text))
            text[at : at + chance.choice((0, 1, 1, 5))] = chance.choice(
                (
                    b"",
                    b"\xff",
                    b'"',
                    b"\\",
                    b"}",
                    b"{",
                    b"0",
                    b"-",
                    b"e9",
                    b",",
                    b"null",
                    b"\\ud800",
                )
            )
        plain, general = made(bytes(text)), made_generally(bytes(text), monkeypatch)
        assert said(plain) == said(general), bytes(text)
        outcomes.add((type(plain), plain_row(bytes(text)) is not None))
    assert outcomes == {(Row, True), (Row, False), (BadRow, False)}


def test_the_key_of_a_plain_row_does_not_know_how_it_was_written() -> None:
    one = line(PLAIN)
    other = (
        b'{"body": {"max_tokens": 8, "messages": '
        + orjson.dumps(HELLO)
        + b', "model": "m"}, "url": "/v1/chat/completions", "custom_id": "a"}'
    )
    assert made(one).key == made(one, pack=True).key == made(other).key
    assert made(one).key != made(line({**PLAIN, "max_tokens": 9})).key
    assert made(one).key != made(line(PLAIN, custom_id="b")).key


@pytest.mark.parametrize(
    ("url", "body"), [(CHAT, plain_rows.ChatBody), (COMPLETIONS, plain_rows.TextBody)]
)
def test_no_field_of_a_plain_row_is_a_mistyped_one(url: str, body: Any) -> None:
    assert KNOWN[url].issuperset(body.__struct_fields__)


def test_two_plain_rows_of_one_name_are_one_too_many() -> None:
    spec = BatchSpec(input_path="in.jsonl", output_path="out.jsonl")
    first, second = RowMaker(spec, "m").make([("in.jsonl", at, line(PLAIN)) for at in (1, 2)])
    assert isinstance(first, Row)
    assert isinstance(second, BadRow)
    assert second.code == "duplicate_custom_id"


def test_parameters_of_the_batch_reach_a_plain_row() -> None:
    spec = BatchSpec(input_path="in.jsonl", output_path="out.jsonl", params={"temperature": 0.5})
    (row,) = RowMaker(spec, "m").make([("in.jsonl", 1, line(PLAIN))])
    assert isinstance(row, Row)
    assert orjson.loads(row.body) == {**PLAIN, "temperature": 0.5}
