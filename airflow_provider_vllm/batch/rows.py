"""A raw record in, a `Row` ready to be posted (or a `BadRow` that says why not) out.

Invariants: a bad record spoils no other; no two of the `Row`s have one custom id; the bytes of a `Row` are exactly
what is sent, so that its key (a fingerprint of custom id, server, URL and those bytes) changes when, and only when,
its name, the request or the server that is asked changes.
"""

from __future__ import annotations

import math
from binascii import hexlify
from collections.abc import Iterable, Iterator
from decimal import Decimal
from hashlib import blake2b
from typing import Any

import orjson

from airflow_provider_vllm.batch import cells, packing
from airflow_provider_vllm.batch.api import (
    CHAT,
    COMPLETIONS,
    LIST_FIELDS,
    MESSAGES_TOO,
    OTHER_PROMPTS,
    PAIR_FIELDS,
    PROMPT_FIELDS,
    RESPONSES,
    ROLES,
    URLS,
    url_of,
)
from airflow_provider_vllm.batch.compact import IntSet
from airflow_provider_vllm.batch.exact import loads
from airflow_provider_vllm.batch.needs import lacks, prompt_columns
from airflow_provider_vllm.batch.parameters import Spelling
from airflow_provider_vllm.batch.plain_rows import plain_row
from airflow_provider_vllm.batch.row import BadRow, Row
from airflow_provider_vllm.batch.source import RecordError
from airflow_provider_vllm.batch.sources import Record
from airflow_provider_vllm.batch.spec import BatchSpec, schema_of
from airflow_provider_vllm.batch.template import RowError, Template
from airflow_provider_vllm.batch.values import is_empty, is_finite, is_utf8

# What objects of a list that are no JSON raise where they are looked at: one row's matter, too.
ODD = (TypeError, ValueError, ArithmeticError, RecursionError)
URL_MARKS = {url: b"\0" + url.encode() + b"\0" for url in URLS}


class RowMaker:
    """Makes rows of one spec for one model. Not thread-safe: it remembers the custom ids that it has seen.

    `server` is the endpoint's fingerprint; `spelling` is shown the fields of every request.
    """

    def __init__(
        self,
        spec: BatchSpec,
        model: str,
        expected: int = 0,
        *,
        pack: bool = False,
        server: str = "",
        spelling: Spelling | None = None,
    ) -> None:
        self._spec = spec
        self._model = spec.model or model
        self._url = self.url = spec.endpoint  # `url` is that of the row that was made last
        self._template = Template(spec.prompt_template) if spec.prompt_template else None
        self._schema = schema_of(spec.output_schema)
        self._next = 0
        self._seen = IntSet(expected)
        self._named = False  # whether a custom id was seen
        self._unnamed = 0  # rows before it that have default ids
        self._limit = spec.max_row_bytes
        self._offset = spec.row_offset
        self._changes = bool(spec.params or spec.system_prompt is not None or self._schema)
        self._pack = pack
        self._names = prompt_columns(spec)
        self._spelling = spelling
        self._roles = ROLES.union(spec.extra_roles)
        self._from_file = spec.prompts is None
        self._may_be_infinite = (
            bool(spec.params) or not self._from_file
        )  # the files' own JSON is checked when read
        self._marks = {url: mark + server.encode() for url, mark in URL_MARKS.items()}

    def rows(self, records: Iterable[Record]) -> Iterator[Row | BadRow]:
        """One `Row` or `BadRow` a record, as it is asked for, numbered from 0 in input order."""
        for record in records:
            yield from self.make((record,))

    def make(self, records: Iterable[Record]) -> list[Row | BadRow]:
        """The same all at once, numbered on from the records before."""
        rows: list[Row | BadRow] = []
        number, make, add = self._next, self._make, rows.append
        for source, line, value in records:
            try:
                row = make(number, value)
            except (RowError, RecordError) as error:
                add(self._bad(number, source, line, value, error))
            except ODD as error:
                odd = RowError("invalid_value", f"cannot be sent: {type(error).__name__}: {error}")
                add(self._bad(number, source, line, None, odd))
            else:
                row.source, row.line = source, line
                add(row)
            number += 1
        self._next = number
        return rows

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

    def _take(self, custom_id: str) -> bytes:
        """The identity of a row that names itself. Raises RowError where an earlier row has the name."""
        try:
            identity = b"=" + custom_id.encode()
        except UnicodeEncodeError:
            raise RowError("invalid_custom_id", "custom_id is not UTF-8", "custom_id") from None
        self._named = True
        if (self._unnamed and self._is_default(custom_id)) or not self._seen.add(hash(custom_id)):
            raise RowError(
                "duplicate_custom_id", f"custom_id {custom_id!r} is an earlier row's", "custom_id"
            )
        return identity

    def _is_default(self, custom_id: str) -> bool:
        """Whether an earlier row without a name has it as its default id."""
        if not custom_id.startswith("row-"):
            return False
        tail = custom_id[len("row-") :]
        if not tail.isdecimal() or len(tail) > 18:
            return False
        number = int(tail) - self._offset - 1
        return 0 <= number < self._unnamed and self.default_id(number) == custom_id

    def _bad(
        self, number: int, source: str, line: int, value: Any, error: RowError | RecordError
    ) -> BadRow:
        record = value.columns if isinstance(value, RecordError) else value
        if isinstance(value, bytes):
            try:
                record = loads(value)
            except orjson.JSONDecodeError:
                record = None
        own = _own_id(record) if isinstance(record, dict) else None
        if own and not isinstance(value, RecordError):  # whose cells may stand in the wrong columns
            self._named = True
            self._seen.add(hash(own))
        custom_id = own or self.default_id(number)
        return BadRow(number, custom_id, error.code, str(error), source, line, error.field)

    def _make(self, number: int, value: Any) -> Row:
        table = False
        if isinstance(value, bytes):
            if not self._changes and (plain := plain_row(value)) is not None:
                custom_id, url, sent = plain
                row = self._sent(number, custom_id, url, sent, self._take(custom_id))
                if self._pack:
                    packing.prepare(row, loads(sent))
                return row
            try:
                value = loads(value)
            except orjson.JSONDecodeError as error:
                raise RowError("invalid_json", _not_json(value, error)) from None
        else:
            table = self._from_file
        own = None
        if isinstance(value, dict):
            if not table and _is_batch_row(value):
                return self._batch_row(number, value)
            body = self._plain(value, table)
            if "custom_id" in value:
                own = _own_id(value)
        elif isinstance(value, RecordError):
            raise value
        elif self._template is not None and isinstance(value, str):
            body = self._prompt(self._template.fill({"prompt": value}))
        else:
            body = self._prompt(value)
        if own is not None:
            return self._row(number, own, self._url, body, self._take(own))
        name = self._free_id(number)
        return self._row(number, name, self._url, body, b"#" + name.encode())

    def _row(
        self, number: int, custom_id: str, url: str, body: dict[str, Any], identity: bytes
    ) -> Row:
        try:
            sent = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        except (TypeError, orjson.JSONEncodeError) as error:
            raise RowError("invalid_value", f"cannot be sent as JSON: {error}", "body") from None
        if self._may_be_infinite and b"null" in sent and not is_finite(body):
            raise RowError("invalid_value", "holds a number that is not finite", "body")
        row = self._sent(number, custom_id, url, sent, identity)
        if self._spelling is not None:
            self._spelling.look(url, body, number)
        if self._pack:
            packing.prepare(row, body)
        return row

    def _sent(self, number: int, custom_id: str, url: str, sent: bytes, identity: bytes) -> Row:
        """The row of a request. Raises RowError where it is too long."""
        if len(sent) > self._limit:
            raise RowError("row_too_long", f"the request has {len(sent) / 1e6:.1f} MB", "body")
        self.url = url
        mark = blake2b(identity + self._marks[url] + sent, digest_size=8)
        return Row(number, custom_id, url, sent, hexlify(mark.digest()))

    def _batch_row(self, number: int, value: dict[str, Any]) -> Row:
        """An OpenAI batch row; everything but `custom_id`, `url` and `body` is optional."""
        custom_id = value.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise RowError("invalid_custom_id", "custom_id is missing or not text", "custom_id")
        method = value.get("method", "POST")
        if not isinstance(method, str) or method != "POST":
            raise RowError("invalid_method", f"method is {method!r}; only POST is known", "method")
        asked = value.get("url", self._url)
        url = url_of(asked) if isinstance(asked, str) else None
        if url is None:
            raise RowError("invalid_url", f"url is {asked!r}; known are {', '.join(URLS)}", "url")
        if "body" not in value:
            raise RowError("invalid_row", "body is missing", "body")
        body = value["body"]
        if not isinstance(body, dict):
            raise RowError("invalid_body", f"body is {_kind(body)}, not an object", "body")
        if "stream" in body and not is_empty(body["stream"]):
            raise RowError("stream", "stream is true; a batch does not stream", "body.stream")
        if self._changes or "model" not in body:
            body = {"model": self._model, **self._spec.params, **body}
        self._finish(url, body)
        return self._row(number, custom_id, url, body, self._take(custom_id))

    def _plain(self, value: dict[str, Any], table: bool) -> dict[str, Any]:
        """A body from a row of columns; in a `table` (CSV, Parquet) an empty parameter is none."""
        spec = self._spec
        extra: dict[str, Any] = {}
        if (own := value.get("params")) is not None:
            extra.update(cells.parameters(own, table))
        for name in spec.param_columns:
            if (cell := cells.parameter(name, value.get(name))) is not None:
                extra[name] = cell
        if not is_empty(extra.get("stream")):
            raise RowError("stream", "stream is true; a batch does not stream", "params.stream")
        if (pairs := PAIR_FIELDS.get(self._url)) is not None:
            for group in pairs:
                if not any(_is_missing(value.get(name), table) for name in group):
                    pair = {
                        n: (n in LIST_FIELDS and cells.json_of(value[n], "[")) or value[n]
                        for n in group
                    }
                    return {"model": self._model, **spec.params, **extra, **pair}
            raise RowError("missing_column", str(lacks(spec, ())), pairs[0][0])
        if self._template is not None:
            return self._prompt(self._template.fill(value), extra)
        empty = None
        for name in self._names:
            prompt = value.get(name)
            if prompt is None or (isinstance(prompt, (str, list)) and not prompt):
                if empty is None or (value[empty] is None and prompt is not None):
                    empty = name if name in value else empty
                continue
            if name == "messages":
                prompt = cells.messages(prompt, table)
            return self._prompt(prompt, extra, name)
        if empty is None:
            raise RowError("missing_column", str(lacks(spec, value)), self._names[0])
        if value[empty] is None:
            raise RowError("null_prompt", f"column {empty} is null", empty)
        code = "invalid_messages" if empty == "messages" else "invalid_prompt"
        raise RowError(code, f"{empty} is empty", empty)

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
        if isinstance(prompt, tuple):
            prompt = list(prompt)
        if isinstance(prompt, str) and not prompt:
            raise RowError("invalid_prompt", f"{field} is empty", field)
        if url == CHAT and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif url in MESSAGES_TOO and isinstance(prompt, list) and _are_messages(prompt):
            name = "messages"
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
                role = message.get("role") if isinstance(message, dict) else None
                if role.__class__ is not str or role not in self._roles:
                    raise RowError("invalid_messages", _what_role(message, role), "messages")
            if self._spec.system_prompt is not None and messages[0]["role"] != "system":
                body["messages"] = [
                    {"role": "system", "content": self._spec.system_prompt},
                    *messages,
                ]
        elif (name := PROMPT_FIELDS.get(url)) is not None:
            if all(is_empty(body.get(n)) for n in (name, *OTHER_PROMPTS.get(url, ()))):
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


def _not_json(line: bytes, error: orjson.JSONDecodeError) -> str:
    at = line.decode("utf-8", "replace")[error.pos :]
    if line.endswith(b","):
        hint = "; there is no comma after a row"
    elif at.startswith(("NaN", "Infinity", "-Infinity")):
        hint = "; NaN and Infinity are no JSON, write null"
    else:
        hint = ""
    return f"not JSON: {error.msg} at character {error.pos + 1}{hint}"


def _own_id(value: dict[str, Any]) -> str | None:
    """The `custom_id` of a row of columns; None where it has none that can name it."""
    own = value.get("custom_id")
    if isinstance(own, (float, Decimal)) and math.isfinite(own) and own == int(own):
        own = int(own)  # what a column of integers with a null in it may have become
    if type(own) is int:
        return str(own)
    return own if isinstance(own, str) and own and is_utf8(own) else None


def _are_messages(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], dict) and "role" in prompt[0]


def _what_role(message: Any, role: Any) -> str:
    if isinstance(role, str):
        return f"role {role!r} is unknown; where the model's chat template has it, name it in extra_roles"
    hint = (
        ""
        if isinstance(message, dict) and "content" in message
        else " (a list is one chat, not several rows)"
    )
    return f"every message must be an object with a role{hint}"


def _is_batch_row(value: dict[str, Any]) -> bool:
    """Whether a row is of OpenAI's batch format; `body` alone is a column like any other."""
    known = "url" in value and "method" in value
    if "custom_id" in value and known:
        return True
    return isinstance(value.get("body"), dict) and ("custom_id" in value or known)


def _is_missing(cell: Any, table: bool) -> bool:
    return cell is None or (table and cell == "")  # as CSV writes a missing value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(
        type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__
    )
