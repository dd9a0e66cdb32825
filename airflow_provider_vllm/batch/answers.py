"""A server's reply in, the row's line in the results or errors file out.

Lines have the form of OpenAI batch results: `id`, `custom_id`, `response` (`status_code`,
`request_id`, `body`), `error`. Invariant: the same reply gives the same bytes; ids come from the row's
key, not from a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from airflow_provider_vllm.batch.api import (
    ITEM_FIELDS,
    MOST_TOKENS,
    NOT_READABLE,
    RESPONSES,
    UNFINISHED,
    UNFINISHED_STATUS,
    answers_of,
)
from airflow_provider_vllm.batch.plain_answers import plain_answer
from airflow_provider_vllm.batch.records import value_of
from airflow_provider_vllm.batch.row import BadRow, Row

HEAD = (
    b'%b %d ok %d %d {"id":"vllm-%b","custom_id":%b,'
    b'"response":{"status_code":200,"request_id":%b,"body":'
)
TAIL = b'},"error":null}\n'
loads, dumps = orjson.loads, orjson.dumps
Check = Callable[[str], "str | None"]
MOST_BODY = 1 << 20  # bytes of a response that an error row keeps
CUT_OFF = frozenset(["length", "max_output_tokens"])
CUT_OFF_MARKS = (b'"length"', b'"max_output_tokens"')
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class NotAnAnswer(Exception):
    """Status 200 with something else than an answer."""


class InvalidOutput(Exception):
    """An answer that breaks the output schema; its tokens were generated all the same."""

    def __init__(
        self, message: str, prompt_tokens: int, completion_tokens: int, cut_off: bool
    ) -> None:
        super().__init__(message)
        self.counts = (prompt_tokens, completion_tokens, cut_off)


def answer(
    row: Row, raw: bytes, check: Check | None = None, sums: tuple[int, int] | None = None
) -> tuple[bytes, bytes, int, int, bool]:
    """What a reply with status 200 says: head and body of its record, prompt and completion tokens, if it is cut off.

    The record is `head + body + TAIL`. `sums` replaces the body's own usage, for packs. Raises
    NotAnAnswer, InvalidOutput.
    """
    usual = None if check is not None or sums is not None else plain_answer(row.url, raw)
    if usual is not None:
        answer_id, prompt, completion, cut_off = usual
    else:
        raw, answer_id, prompt, completion, cut_off = _any_answer(row, raw, check, sums)
    key, name, said = row.key, dumps(answer_id), dumps(row.custom_id)
    head = HEAD % (key, row.number, prompt, completion, key, said, name)
    return head, raw, prompt, completion, cut_off


def _any_answer(
    row: Row, raw: bytes, check: Check | None, sums: tuple[int, int] | None
) -> tuple[bytes, Any, int, int, bool]:
    """The body on one line, its id, its tokens, whether it was cut off. Raises NotAnAnswer, InvalidOutput."""
    try:
        body = loads(raw)
        items = body[ITEM_FIELDS[row.url]]
        if not items or not isinstance(items, list):
            raise NotAnAnswer("the answer is empty")
        answers_of(body)
        if unfinished := _unfinished(row.url, body):
            raise NotAnAnswer(f"the server cut the answer short ({unfinished})")
        prompt, completion = sums or tokens_of(body)
        cut_off = is_cut_off(body)
    except orjson.JSONDecodeError as error:
        raise NotAnAnswer(f"the answer is not JSON: {error}") from None
    except NOT_READABLE:
        raise NotAnAnswer(f"the answer is not one of {row.url}") from None
    try:
        dumps(body.get("id"))
        if b"\n" in raw:
            raw = dumps(body)
    except TypeError as error:  # it is read to a greater depth than it is written
        raise NotAnAnswer(f"the answer cannot be written down: {error}") from None
    if check is not None and (wrong := check_output(body, check)) is not None:
        raise InvalidOutput(_limit(row) if cut_off else wrong, prompt, completion, cut_off)
    return raw, body.get("id"), prompt, completion, cut_off


def tokens_of(body: dict[str, Any]) -> tuple[int, int]:
    """Prompt and completion tokens of an answer; 0 for a usage that is missing or strange."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return 0, 0
    prompt = (
        usage.get("prompt_tokens") or usage.get("input_tokens") or 0
    )  # the latter of /v1/responses
    completion = usage.get("completion_tokens") or usage.get("output_tokens") or 0
    known = type(prompt) is int and type(completion) is int
    if not known or min(prompt, completion) < 0 or max(prompt, completion) > MOST_TOKENS:
        return 0, 0
    return prompt, completion


def check_output(body: dict[str, Any], check: Check) -> str | None:
    """What is wrong with the first answer text that breaks the schema."""
    try:
        found = answers_of(body)
    except NOT_READABLE:
        return "the answer has no text"
    for text in found:
        wrong = check(text) if isinstance(text, str) else "the answer has no text"
        if wrong is not None:
            return wrong
    return None


def _unfinished(url: str, body: dict[str, Any]) -> str | None:
    """What says that an answer was broken off by the server, not by the model or a limit."""
    if url == RESPONSES and body.get("status") in UNFINISHED_STATUS:
        return f"status {body['status']}"
    ends = _ends(body) & UNFINISHED
    return f"finish_reason {min(ends)}" if ends else None


def _ends(body: dict[str, Any]) -> set[Any]:
    """Why each choice of an answer ended."""
    choices = body.get("choices") or ()
    details = body.get("incomplete_details")
    ends = [item.get("finish_reason") for item in choices]
    ends.append(details.get("reason") if isinstance(details, dict) else None)
    return {end for end in ends if isinstance(end, str)}


def is_cut_off(body: dict[str, Any]) -> bool:
    """Whether a limit of tokens ended an answer, and not the model."""
    return not _ends(body).isdisjoint(CUT_OFF)


def _limit(row: Row) -> str:
    """What cut the answer to a row off."""
    asked = loads(row.body)
    for name in LIMITS:
        if asked.get(name) is not None:
            return f"the answer was cut off at {name}={asked[name]}; raise it"
    return "the answer was cut off at the server's limit; set max_tokens, or raise max_model_len"


def was_cut_off(line: bytes) -> bool:
    """Whether the answer in a line of the results was."""
    try:
        return any(mark in line for mark in CUT_OFF_MARKS) and is_cut_off(
            value_of(line)["response"]["body"]
        )
    except (ValueError, *NOT_READABLE):
        return False


def still_keeps(line: bytes, check: Check) -> bool:
    """Whether the answer in a line of the results keeps to a schema."""
    try:
        body = value_of(line)["response"]["body"]
    except (ValueError, KeyError, TypeError):
        return False
    return check_output(body, check) is None


def error_line(
    row: Row | BadRow,
    code: str,
    message: str,
    *,
    status: int | None = None,
    body: bytes | None = None,
) -> bytes:
    """The line of a failed row, with its place; with `status`, the server's own body is kept."""
    response = None
    if status is not None:
        parsed: Any
        kept = (body or b"null")[:MOST_BODY]
        try:
            parsed = orjson.loads(kept)
            dumps(parsed)
        except (orjson.JSONDecodeError, TypeError):  # what is nested too deep is read, not written
            parsed = kept.decode("utf-8", "replace")
        response = {"status_code": status, "request_id": None, "body": parsed}
    error: dict[str, Any] = {"code": code, "message": clean(message)}
    error |= {"file": clean(row.source), "line": row.line}
    if isinstance(row, BadRow) and row.field is not None:
        error["field"] = clean(row.field)
    return dumps(
        {
            "id": f"vllm-{row.key.decode()}",
            "custom_id": row.custom_id,
            "response": response,
            "error": error,
        }
    )


def bad_row_line(row: BadRow) -> bytes:
    """The line of a record that was never sent."""
    return error_line(row, row.code, row.text)


def clean(text: str) -> str:
    """Text that can be written as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
