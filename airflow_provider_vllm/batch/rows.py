"""A raw record in, a `Row` ready to be posted (or a `BadRow` that says why not) out.

Invariants: a bad record spoils no other; the bytes of a `Row` are exactly what is sent, so that its key (a
fingerprint of identity, server, URL and those bytes) changes when, and only when, the request or the server that
is asked changes.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import orjson

from airflow_provider_vllm.batch import packing
from airflow_provider_vllm.batch.api import (
    CHAT,
    COMPLETIONS,
    PAIR_FIELDS,
    PATHS,
    PROMPT_FIELDS,
    RESPONSES,
    URLS,
)
from airflow_provider_vllm.batch.compact import IntSet
from airflow_provider_vllm.batch.row import BadRow, Row
from airflow_provider_vllm.batch.sources import Record, RecordError
from airflow_provider_vllm.batch.spec import BatchSpec, schema_of
from airflow_provider_vllm.batch.template import RowError, Template

PROMPT_COLUMNS = ("prompt", "messages", "text", "input")
URL_MARKS = {url: b"\0" + url.encode() + b"\0" for url in URLS}


class RowMaker:
    """Makes rows of one spec for one model. Not thread-safe: it remembers the custom ids that it has seen.

    `server` is the endpoint's fingerprint.
    """

    def __init__(
        self,
        spec: BatchSpec,
        model: str,
        expected: int = 0,
        *,
        pack: bool = False,
        server: str = "",
    ) -> None:
        self._spec = spec
        self._model = spec.model or model
        self._url = spec.endpoint
        self._template = Template(spec.prompt_template) if spec.prompt_template else None
        self._schema = schema_of(spec.output_schema)
        self._seen = IntSet(expected)
        self._named = False  # whether a custom id was seen
        self._unnamed = 0  # rows before it that have default ids
        self._limit = spec.max_row_bytes
        self._offset = spec.row_offset
        self._changes = bool(spec.params or spec.system_prompt is not None or self._schema)
        self._pack = pack
        self._from_file = spec.prompts is None
        self._marks = {url: mark + server.encode() for url, mark in URL_MARKS.items()}

    def rows(self, records: Iterator[Record]) -> Iterator[Row | BadRow]:
        """One `Row` or `BadRow` a record, numbered from 0 in input order."""
        make, wrong = self._make, self._bad
        number = -1
        for source, line, value in records:
            number += 1
            try:
                yield make(number, value)
            except (RowError, RecordError) as error:
                yield wrong(number, source, line, value, error)

    def default_id(self, number: int) -> str:
        return f"row-{number + self._offset + 1}"

    def _free_id(self, number: int) -> str:
        """The default id, or one like it where an earlier row has that as its custom id."""
        name = self.default_id(number)
        if not self._named:
            self._unnamed = number + 1
            return name
        while not self._seen.add(hash(name)):
            name += "'"
        return name

    def _is_new(self, custom_id: str) -> bool:
        self._named = True
        tail = custom_id.removeprefix("row-")
        if self._unnamed and tail != custom_id and tail.isdecimal() and len(tail) < 19:
            number = int(tail) - self._offset - 1
            if 0 <= number < self._unnamed and self.default_id(number) == custom_id:
                return False
        return self._seen.add(hash(custom_id))

    def _bad(self, number: int, source: str, line: int, value: Any, error: Any) -> BadRow:
        record = value
        if isinstance(value, bytes):
            try:
                record = orjson.loads(value)
            except orjson.JSONDecodeError:
                record = None
        own = record.get("custom_id") if isinstance(record, dict) else None
        custom_id = (
            own if isinstance(own, str) and own and _is_utf8(own) else self.default_id(number)
        )
        return BadRow(
            number, custom_id, error.code, str(error), source, line, getattr(error, "field", None)
        )

    def _make(self, number: int, value: Any) -> Row:
        table = self._from_file and not isinstance(value, bytes)
        if isinstance(value, bytes):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError as error:
                raise RowError("invalid_json", f"not JSON: {error}") from None
        if isinstance(value, dict):
            if not table and _is_batch_row(value):
                return self._batch_row(number, value)
            body = self._plain(value, table)
        elif isinstance(value, RecordError):
            raise value
        elif self._template is not None and isinstance(value, str):
            body = self._prompt(self._template.fill({"prompt": value}))
        else:
            body = self._prompt(value)
        identity = b"#%d" % (number + self._offset)
        return self._row(number, self._free_id(number), self._url, body, identity)

    def _row(
        self, number: int, custom_id: str, url: str, body: dict[str, Any], identity: bytes
    ) -> Row:
        try:
            sent = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        except (TypeError, orjson.JSONEncodeError) as error:
            raise RowError("invalid_value", f"cannot be sent as JSON: {error}", "body") from None
        if len(sent) > self._limit:
            raise RowError("row_too_long", f"the request has {len(sent) / 1e6:.1f} MB", "body")
        mark = blake2b(identity + self._marks[url] + sent, digest_size=8)
        row = Row(number, custom_id, url, sent, hexlify(mark.digest()))
        if self._pack:
            packing.prepare(row, body)
        return row

    def _batch_row(self, number: int, value: dict[str, Any]) -> Row:
        """An OpenAI batch row; everything but `custom_id`, `url` and `body` is optional."""
        custom_id = value.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise RowError("invalid_custom_id", "custom_id is missing or not text", "custom_id")
        if value.get("method", "POST") != "POST":
            raise RowError(
                "invalid_method", f"method is {value['method']!r}; only POST is known", "method"
            )
        asked = value.get("url", self._url)
        url = PATHS.get(asked) if isinstance(asked, str) else None
        if url is None:
            raise RowError("invalid_url", f"url is {asked!r}; known are {', '.join(URLS)}", "url")
        if "body" not in value:
            raise RowError("invalid_row", "body is missing", "body")
        body = value["body"]
        if not isinstance(body, dict):
            raise RowError("invalid_body", f"body is {_kind(body)}, not an object", "body")
        if body.get("stream"):
            raise RowError("stream", "stream is true; a batch does not stream", "body.stream")
        if self._changes or "model" not in body:
            body = {"model": self._model, **self._spec.params, **body}
        self._finish(url, body)
        try:
            identity = b"=" + custom_id.encode()
        except UnicodeEncodeError:
            raise RowError("invalid_custom_id", "custom_id is not UTF-8", "custom_id") from None
        if not self._is_new(custom_id):
            raise RowError(
                "duplicate_custom_id",
                f"custom_id {custom_id!r} stood in an earlier row",
                "custom_id",
            )
        return self._row(number, custom_id, url, body, identity)

    def _plain(self, value: dict[str, Any], table: bool) -> dict[str, Any]:
        """A body from a row of columns; in a `table` (CSV, Parquet) an empty parameter is none."""
        spec = self._spec
        extra: dict[str, Any] = {}
        own = value.get("params")
        if isinstance(own, dict):
            extra.update(own)
        for name in spec.param_columns:
            cell = value.get(name)
            if cell is not None and not (table and isinstance(cell, str) and not cell.strip()):
                extra[name] = _number(cell)
        if extra.get("stream"):
            raise RowError("stream", "stream is true; a batch does not stream", "params.stream")
        if (pairs := PAIR_FIELDS.get(self._url)) is not None:
            for group in pairs:
                if all(value.get(name) is not None for name in group):
                    return {
                        "model": self._model,
                        **spec.params,
                        **extra,
                        **{n: value[n] for n in group},
                    }
            raise RowError(
                "missing_column",
                f"needs {' or '.join(' and '.join(n) for n in pairs)}",
                pairs[0][0],
            )
        if self._template is not None:
            return self._prompt(self._template.fill(value), extra)
        names: tuple[str, ...] = (spec.prompt_column,) if spec.prompt_column else PROMPT_COLUMNS
        for name in names:
            if name in value:
                if value[name] is None:
                    raise RowError("null_prompt", f"column {name} is null", name)
                return self._prompt(value[name], extra, name)
        raise RowError("missing_column", f"no column {' or '.join(names)}", names[0])

    def _prompt(
        self, prompt: Any, extra: dict[str, Any] | None = None, field: str = "prompt"
    ) -> dict[str, Any]:
        """A body from a prompt: text, messages or token ids."""
        url = self._url
        name = PROMPT_FIELDS.get(url)
        if name is None:
            raise RowError(
                "invalid_row", f"{url} needs rows with columns, not {_kind(prompt)}", field
            )
        if not isinstance(prompt, str) and hasattr(prompt, "tolist"):
            prompt = prompt.tolist()  # numpy
        if isinstance(prompt, str) and not prompt:
            raise RowError("invalid_prompt", f"{field} is empty", field)
        if url == CHAT and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif not isinstance(prompt, (str, list)):
            raise RowError(
                "invalid_prompt", f"{field} is {_kind(prompt)}, not text or a list", field
            )
        body = {"model": self._model, **self._spec.params, **(extra or {}), name: prompt}
        self._finish(url, body)
        return body

    def _finish(self, url: str, body: dict[str, Any]) -> None:
        """What every generating row gets: checks of its prompt, the system prompt, the schema."""
        if url == CHAT:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise RowError("invalid_messages", "messages is missing or empty", "messages")
            for message in messages:
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise RowError(
                        "invalid_messages",
                        "every message must be an object with a role",
                        "messages",
                    )
            if self._spec.system_prompt is not None and messages[0]["role"] != "system":
                body["messages"] = [
                    {"role": "system", "content": self._spec.system_prompt},
                    *messages,
                ]
        elif (name := PROMPT_FIELDS.get(url)) is not None:
            if _is_empty(body.get(name)):
                raise RowError("invalid_prompt", f"{name} is missing or empty", name)
            if url == RESPONSES and self._spec.system_prompt is not None:
                body.setdefault("instructions", self._spec.system_prompt)
        if self._schema is not None:
            self._ask_schema(url, body)

    def _ask_schema(self, url: str, body: dict[str, Any]) -> None:
        if url == CHAT:
            wanted = {"name": "answer", "schema": self._schema, "strict": True}
            body.setdefault("response_format", {"type": "json_schema", "json_schema": wanted})
        elif url == COMPLETIONS:
            body.setdefault("structured_outputs", {"json": self._schema})
        elif url == RESPONSES:
            wanted = {
                "type": "json_schema",
                "name": "answer",
                "schema": self._schema,
                "strict": True,
            }
            body.setdefault("text", {"format": wanted})


def _number(value: Any) -> Any:
    """CSV columns are text: `0.5` becomes a number, other text stays."""
    if not isinstance(value, str):
        return value
    casts: tuple[Callable[[str], Any], ...] = (int, float)
    for cast in casts:
        try:
            return cast(value)
        except ValueError:
            continue
    return value


def _is_batch_row(value: dict[str, Any]) -> bool:
    """Whether a row is of OpenAI's batch format; `body` alone is a column like any other."""
    known = "url" in value and "method" in value
    if "custom_id" in value and known:
        return True
    return isinstance(value.get("body"), dict) and ("custom_id" in value or known)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, dict, int, float)) and not value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(
        type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__
    )
