"""What a server may say with status 200, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from airflow_provider_vllm.batch.answers import (
    TAIL,
    InvalidOutput,
    NotAnAnswer,
    answer,
    check_output,
    error_line,
    was_cut_off,
)
from airflow_provider_vllm.batch.api import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    URLS,
    answer_of,
)
from airflow_provider_vllm.batch.packing import split
from airflow_provider_vllm.batch.plain_answers import plain_answer
from airflow_provider_vllm.batch.records import value_of
from airflow_provider_vllm.batch.row import Row

GOOD = {
    "id": "x",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4},
}


def row(url: str = CHAT) -> Row:
    return Row(5, 'own "id" ü', url, b"{}", b"0123456789abcdef")


def test_a_good_one() -> None:
    raw = json.dumps(GOOD, indent=1).encode()
    head, body, prompt, completion, _ = answer(row(), raw)
    assert (prompt, completion) == (3, 4)
    record = head + body + TAIL
    assert record.count(b"\n") == 1
    assert record.startswith(b"0123456789abcdef 5 ok 3 4 {")
    line = json.loads(record.split(b" ", 5)[5])
    assert line["custom_id"] == 'own "id" ü'
    assert line["response"] == {"status_code": 200, "request_id": "x", "body": GOOD}


@pytest.mark.parametrize(
    "raw",
    [b"", b"null", b"[]", b"5", b'"x"', b"<html>", b"{}", b'{"choices": []}', b'{"choices": {"a": 1}}',
     b'{"choices": null}', b'{"data": [1]}', b'{"choices": [1], "usage": [1]}', b'{"choices": [{}]', b"\xff",
     b'{"choices": [{}]}', b'{"choices": [{"message": null}]}', b'{"choices": [{"message": "text"}]}',
     b'{"choices": [null]}'],
)  # fmt: skip
@pytest.mark.parametrize("url", [CHAT])
def test_what_is_no_answer(raw: bytes, url: str) -> None:
    with pytest.raises(NotAnAnswer):
        answer(row(url), raw)


TEXT = {"choices": [{"index": 0, "text": "hello"}], "id": None, "usage": None}
ONE = GOOD["choices"]


@pytest.mark.parametrize(
    ("url", "body", "is_plain"),
    [
        (CHAT, GOOD, True),
        (CHAT, {**GOOD, "usage": {"prompt_tokens": 2, "other": [1]}}, True),
        (CHAT, {"choices": [{"message": {"content": None, "tool_calls": [{}]}}]}, True),
        (CHAT, {"choices": [{"message": {"role": "assistant"}}]}, True),
        (CHAT, {"choices": [{"message": {"content": "Zürich 日本 \x7f \"", "x": {"y": [1e9, -1]}}}]}, True),
        (COMPLETIONS, {**TEXT, "usage": {"prompt_tokens": 7, "completion_tokens": 0}}, True),
        (CHAT, {"choices": [*ONE, {"message": {"content": "a"}, "finish_reason": "length"}]}, True),
        (COMPLETIONS, {"choices": [{"text": "a", "finish_reason": "length"}]}, True),
        (COMPLETIONS, TEXT, False),  # what follows is read the general way
        (CHAT, {"choices": ONE, "usage": {"prompt_tokens": None, "completion_tokens": 3}}, False),
        (CHAT, {"choices": ONE, "usage": {"prompt_tokens": True, "completion_tokens": 3}}, False),
        (CHAT, {"choices": ONE, "usage": {"prompt_tokens": 1.5}}, False),
        (CHAT, {"choices": ONE, "usage": [1]}, False),
        (CHAT, {"choices": ONE, "usage": {"prompt_tokens": 2**63, "completion_tokens": 3}}, False),
        (CHAT, {"choices": ONE, "usage": {"prompt_tokens": -1, "completion_tokens": 3}}, False),
        (CHAT, {"choices": ONE, "id": 5}, False),
        (CHAT, {"choices": [{"message": {"content": [{"type": "text"}]}}]}, False),
        (CHAT, TEXT, False),
        (EMBEDDINGS, {"data": [{"embedding": [0.5]}], "id": "e"}, False),
    ],
)  # fmt: skip
def test_a_plain_answer_is_read_as_any_other(
    url: str, body: dict[str, Any], is_plain: bool
) -> None:
    raw = orjson.dumps(body)
    found = plain_answer(url, raw)
    assert (found is not None) is is_plain
    shown = raw.replace(b":", b":\n", 1)  # no plain answer has a line break
    assert plain_answer(url, shown) is None
    assert answer(row(url), raw) == answer(row(url), shown)


@pytest.mark.parametrize(
    "raw",
    [b"", b"5", b"null", b'{"choices": []}', b'{"choices": [{"message": {"content": "a"}}], "x": "\xff"}',
     b'{"choices": [{"message": {"content": "\xff"}}]}', b'{"choices": [{"message": {"content": "a"}}]} x',
     b'{"choices": [{"message": {"content": "a"}}], "x": 01}', b'{"choices": [{"message": null}]}',
     b'{"choices": [{"message": {"content": "a"}}], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"],
)  # fmt: skip
def test_what_is_no_answer_is_not_plain(raw: bytes) -> None:
    assert plain_answer(CHAT, raw) is None
    with pytest.raises(NotAnAnswer):
        answer(row(), raw)


@pytest.mark.parametrize("url", URLS)
def test_every_url_knows_its_list(url: str) -> None:
    with pytest.raises(NotAnAnswer, match=url):
        answer(row(url), b'{"something": [1]}')


@pytest.mark.parametrize(
    "usage", ["5", [1], None, {}, {"prompt_tokens": "5"}, {"prompt_tokens": 1.5}]
)
def test_strange_usage_is_counted_as_none(usage: object) -> None:
    raw = json.dumps({**GOOD, "usage": usage}).encode()
    _, _, prompt, completion, _ = answer(row(), raw)
    assert (prompt, completion) == (0, 0)


CUT = {**GOOD, "choices": [{"message": {"content": '{"a": '}, "finish_reason": "length"}]}
CUT_RESPONSE = {
    "output": [{"type": "message", "content": [{"type": "output_text", "text": '{"a": '}]}],
    "incomplete_details": {"reason": "max_output_tokens"},
}


@pytest.mark.parametrize(
    ("url", "asked", "said", "why"),
    [
        (CHAT, {"max_tokens": 8}, CUT, "the answer was cut off at max_tokens=8; raise it"),
        (CHAT, {}, CUT, "cut off at the server's limit; set max_tokens, or raise max_model_len"),
        (RESPONSES, {"max_output_tokens": 9}, CUT_RESPONSE, "cut off at max_output_tokens=9; "),
        (CHAT, {"max_tokens": 8}, GOOD, "^not whole$"),
        (RESPONSES, {}, {**CUT_RESPONSE, "incomplete_details": None}, "^not whole$"),
    ],
)
def test_an_answer_that_was_cut_off_says_so(
    url: str, asked: dict[str, int], said: dict[str, object], why: str
) -> None:
    sent = Row(0, "a", url, json.dumps(asked).encode(), b"0123456789abcdef")
    with pytest.raises(InvalidOutput, match=why):
        answer(sent, json.dumps(said).encode(), lambda text: "not whole")


@pytest.mark.parametrize(
    ("url", "said", "cut"),
    [(CHAT, CUT, True), (RESPONSES, CUT_RESPONSE, True), (CHAT, GOOD, False), (COMPLETIONS, TEXT, False)],
)  # fmt: skip
def test_a_cut_off_answer_is_known_when_it_comes_and_later(
    url: str, said: dict[str, object], cut: bool
) -> None:
    head, body, *_, cut_off = answer(row(url), json.dumps(said).encode())
    assert cut_off is cut
    assert was_cut_off((head + body + TAIL).split(b" ", 5)[5]) is cut


def test_a_text_about_length_is_not_cut_off() -> None:
    said = {"choices": [{"message": {"content": 'say "length", or {"finish_reason":"length"}'}}]}
    head, body, *_, cut_off = answer(row(), json.dumps(said).encode())
    assert not cut_off
    assert not was_cut_off((head + body + TAIL).split(b" ", 5)[5])


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/score", "/classify", "/pooling"])
def test_an_item_without_its_value_is_no_answer(url: str) -> None:
    with pytest.raises(NotAnAnswer, match=url):
        answer(row(url), b'{"data": [{}]}')


def test_only_the_message_of_a_response_is_its_answer() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    parts = [{"type": "output_text", "text": "5"}, {"type": "refusal", "refusal": "no"}]
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    said = {"type": "message", "content": parts}
    assert answer_of({"output": [thought, said, call]}) == "5"
    assert answer_of({"output": [thought, call]}) is None


@pytest.mark.parametrize(
    "body",
    [{"choices": [1]}, {"choices": [{}]}, {"choices": [{"message": None}]}, {"data": [{}]}, {"data": 5},
     {"output": [1]}, {"output": 5}, {}],
)  # fmt: skip
def test_an_unreadable_answer_is_none_and_breaks_every_schema(body: dict[str, object]) -> None:
    assert answer_of(body) is None
    assert check_output(body, lambda text: None) == "the answer has no text"


@pytest.mark.parametrize(
    "raw",
    [b"[]", b"{}", b'{"choices": 5}', b'{"choices": [{"index": 0}]}', b'{"choices": [{"index": 1}, {"index": 2}]}',
     b'{"choices": [{}, {}]}', b'{"choices": [{"index": "a"}, {"index": 0}]}',
     ],
)  # fmt: skip
def test_what_is_no_answer_to_a_pack(raw: bytes) -> None:
    with pytest.raises(NotAnAnswer):
        split([row(), row()], raw)


def test_a_pack_is_split_in_the_order_of_its_rows() -> None:
    items = [{"index": index, "message": {"content": f"answer {index}"}} for index in (2, 0, 1)]
    raw = json.dumps({"id": "p", "choices": items, "usage": {"prompt_tokens": 9}}).encode()
    bodies, prompt, completion = split([row(), row(), row()], raw)
    assert [answer_of(json.loads(body)) for body in bodies] == ["answer 0", "answer 1", "answer 2"]
    assert [json.loads(body)["choices"][0]["index"] for body in bodies] == [0, 0, 0]
    assert (prompt, completion) == (9, 0)


DEEP = b"[" * 300 + b"]" * 300
SAID = b'{"choices":[{"message":{"content":"x"}}],'


@pytest.mark.parametrize("rest", [b'"id":' + DEEP, b'\n"more":' + DEEP])
def test_an_answer_that_is_nested_too_deep_is_none(rest: bytes) -> None:
    row = Row(0, "a", "/v1/chat/completions", b"{}", b"0" * 16)
    with pytest.raises(NotAnAnswer, match="cannot be written down"):
        answer(row, SAID + rest + b"}")
    line = json.loads(error_line(row, "x", "y", status=400, body=DEEP))
    assert line["response"]["body"] == DEEP.decode()


def test_details_of_any_kind_are_no_error() -> None:
    row = Row(0, "a", "/v1/chat/completions", b"{}", b"0" * 16)
    with pytest.raises(InvalidOutput, match="wrong"):
        answer(row, SAID + b'"incomplete_details":"x"}', lambda text: "wrong")


def test_a_number_that_no_double_holds_spoils_no_record() -> None:
    raw = b'{"choices":[{"message":{"content":"x"}}],"more":1e400}'
    head, body, *_ = answer(row(), raw)
    line = value_of((head + body + TAIL).split(b" ", 5)[5])
    assert line["response"]["body"]["more"] == float("inf")
    assert answer_of(line["response"]["body"]) == "x"


CUT = {
    CHAT: {"choices": [{"message": {"content": "hel"}, "finish_reason": "abort"}]},
    COMPLETIONS: {
        "choices": [
            {"text": "whole", "finish_reason": "stop"},
            {"text": "hel", "finish_reason": "abort"},
        ]
    },
    RESPONSES: {
        "status": "cancelled",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "hel"}]}],
    },
}


@pytest.mark.parametrize("url", CUT)
def test_what_a_stopping_server_has_of_an_answer_is_none(url: str) -> None:
    """vLLM that is told to stop, sleep or pause sends it with status 200; kept, it would be half a row for good."""
    raw = orjson.dumps(CUT[url])
    assert plain_answer(url, raw) is None
    with pytest.raises(NotAnAnswer, match=r"cut the answer short \(.*(abort|cancelled)\)"):
        answer(row(url), raw)
    whole = orjson.loads(
        raw.replace(b'"abort"', b'"length"').replace(b'"cancelled"', b'"incomplete"')
    )
    assert answer(row(url), orjson.dumps(whole))


def test_one_of_a_pack_that_was_cut_short_is_asked_again_alone() -> None:
    rows = [row(COMPLETIONS), row(COMPLETIONS)]
    body = {
        "id": "x",
        "choices": [
            {"index": 0, "text": "whole", "finish_reason": "stop"},
            {"index": 1, "text": "hal", "finish_reason": "abort"},
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    }
    bodies, prompt, completion = split(rows, orjson.dumps(body))
    assert answer(rows[0], bodies[0], None, (prompt, completion))
    with pytest.raises(NotAnAnswer, match="cut the answer short"):
        answer(rows[1], bodies[1], None, (0, 0))


def test_an_integer_of_many_digits_is_read_back() -> None:
    """The answer's own reading passes over it, so that it is in the journal, and in the results."""
    line = b'{"a": ' + b"9" * 5000 + b', "b": -' + b"9" * 5000 + b', "c": 12345678901234567890123}'
    assert value_of(line) == {
        "a": float("inf"),
        "b": float("-inf"),
        "c": 12345678901234567890123,
    }


def test_a_response_without_end_is_kept_in_part() -> None:
    """An error row has to be read again, and its file is known as a batch's by its first line."""
    line = error_line(row(), "http_400", "no", status=400, body=b'"' + b"x" * (20 << 20) + b'"')
    assert len(line) < 2 << 20
    assert json.loads(line)["response"]["body"].startswith('"xxx')


def test_a_pack_whose_answer_cannot_be_written_down_is_none() -> None:
    items = b'[{"index": 0, "text": "a", "more": %b}]' % DEEP
    with pytest.raises(NotAnAnswer, match="cannot be written down"):
        split([row(COMPLETIONS)], b'{"id": "x", "choices": ' + items + b"}")
