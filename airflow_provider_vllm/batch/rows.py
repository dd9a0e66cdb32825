"""A raw record in, a `Row` ready to be posted (or a `BadRow` that says why not) out.

Invariants: a bad record spoils no other; the bytes of a `Row` are exactly what is sent, so that its key (a
fingerprint of identity, URL and those bytes) changes when, and only when, the request changes.
"""

from __future__ import annotations

import string
from binascii import hexlify
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from airflow_provider_vllm.batch.compact import IntSet
from airflow_provider_vllm.batch.sources import Record, RecordError
from airflow_provider_vllm.batch.spec import ALIASES, ENDPOINTS, BatchSpec, schema_of
from airflow_provider_vllm.exceptions import InvalidInput

CHAT, COMPLETIONS = ENDPOINTS["chat"], ENDPOINTS["completions"]
EMBEDDINGS, RESPONSES = ENDPOINTS["embeddings"], ENDPOINTS["responses"]
CHAT_BATCH = "/v1/chat/completions/batch"
PACKABLE = {CHAT: CHAT_BATCH, COMPLETIONS: COMPLETIONS, EMBEDDINGS: EMBEDDINGS}
# What vLLM's chat batch endpoint refuses, or knows no field for, or what ties a row to its place in a request.
ALONE = frozenset(
    {
        "n",
        "best_of",
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "use_beam_search",
    }
    | {
        "request_id",
        "echo",
        "prompt_embeds",
        "prompt_logprobs",
        "documents",
        "reasoning_effort",
        "seed",
    }
)
PROMPT_COLUMNS = ("prompt", "messages", "text", "input")
BODY_FIELDS = {
    CHAT: "messages",
    COMPLETIONS: "prompt",
    ENDPOINTS["embeddings"]: "input",
    ENDPOINTS["classify"]: "input",
    ENDPOINTS["pooling"]: "input",
    RESPONSES: "input",
}
PAIR_FIELDS = {
    ENDPOINTS["score"]: (("text_1", "text_2"), ("queries", "documents")),
    ENDPOINTS["rerank"]: (("query", "documents"),),
}

PATHS = {name: url for name, url in ALIASES.items() if name.startswith("/")}
URL_MARKS = {url: b"\0" + url.encode() + b"\0" for url in ENDPOINTS.values()}


class Row:
    """One request. `key` is 16 hex digits.

    `attempts` counts its failed tries, `deaths` the losses of the server that it was in flight at;
    `params` and `prompt` are set where it may be packed.
    """

    attempts = 0
    deaths = 0
    busy_since: float | None = None
    params: bytes | None = None
    prompt: Any = None

    def __init__(self, number: int, custom_id: str, url: str, body: bytes, key: bytes) -> None:
        self.number = number
        self.custom_id = custom_id
        self.url = url
        self.body = body
        self.key = key


@dataclass(frozen=True)
class BadRow:
    """A record that is never sent: where it stands, what is wrong, in which field."""

    number: int
    custom_id: str
    code: str
    message: str
    source: str
    line: int
    field: str | None = None

    @property
    def key(self) -> bytes:
        """The number of the row: a broken record has no request to take a fingerprint of."""
        return b"%016x" % self.number


class _Wrong(Exception):
    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code, self.field = code, field


class RowMaker:
    """Makes rows of one spec for one model. Not thread-safe: it remembers the custom ids that it has seen."""

    def __init__(
        self, spec: BatchSpec, model: str, expected: int = 0, *, pack: bool = False
    ) -> None:
        self._spec = spec
        self._model = spec.model or model
        self._url = spec.endpoint
        self._template = Template(spec.prompt_template) if spec.prompt_template else None
        self._schema = schema_of(spec.output_schema)
        self._seen = IntSet(expected)
        self._limit = spec.max_row_bytes
        self._offset = spec.row_offset
        self._changes = bool(spec.params or spec.system_prompt is not None or self._schema)
        self._pack = pack

    def rows(self, records: Iterator[Record]) -> Iterator[Row | BadRow]:
        """One `Row` or `BadRow` a record, numbered from 0 in input order."""
        make, wrong = self._make, self._bad
        number = -1
        for source, line, value in records:
            number += 1
            try:
                yield make(number, value)
            except (_Wrong, RecordError) as error:
                yield wrong(number, source, line, value, error)

    def default_id(self, number: int) -> str:
        return f"row-{number + self._offset + 1}"

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
        if isinstance(value, bytes):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError as error:
                raise _Wrong("invalid_json", f"not JSON: {error}") from None
        if isinstance(value, dict):
            if "body" in value and ("custom_id" in value or "url" in value or "method" in value):
                return self._batch_row(number, value)
            if "url" in value and "custom_id" in value and "method" in value:
                raise _Wrong("invalid_row", "body is missing", "body")
            body = self._plain(value)
        elif isinstance(value, RecordError):
            raise value
        else:
            body = self._prompt(value)
        identity = b"%d" % (number + self._offset)
        return self._row(number, self.default_id(number), self._url, body, identity)

    def _row(
        self, number: int, custom_id: str, url: str, body: dict[str, Any], identity: bytes
    ) -> Row:
        try:
            sent = orjson.dumps(body)
        except (TypeError, orjson.JSONEncodeError) as error:
            raise _Wrong("invalid_value", f"cannot be sent as JSON: {error}", "body") from None
        if len(sent) > self._limit:
            raise _Wrong("row_too_long", f"the request has {len(sent) / 1e6:.1f} MB", "body")
        mark = blake2b(identity + URL_MARKS[url] + sent, digest_size=8)
        row = Row(number, custom_id, url, sent, hexlify(mark.digest()))
        if self._pack:
            prepare(row, body)
        return row

    def _batch_row(self, number: int, value: dict[str, Any]) -> Row:
        """An OpenAI batch row; everything but `custom_id`, `url` and `body` is optional."""
        custom_id = value.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise _Wrong("invalid_custom_id", "custom_id is missing or not text", "custom_id")
        if value.get("method", "POST") != "POST":
            raise _Wrong(
                "invalid_method", f"method is {value['method']!r}; only POST is known", "method"
            )
        asked = value.get("url", self._url)
        url = PATHS.get(asked) if isinstance(asked, str) else None
        if url is None:
            raise _Wrong(
                "invalid_url", f"url is {asked!r}; known are {', '.join(ENDPOINTS.values())}", "url"
            )
        body = value["body"]
        if not isinstance(body, dict):
            raise _Wrong("invalid_body", f"body is {_kind(body)}, not an object", "body")
        if body.get("stream"):
            raise _Wrong("stream", "stream is true; a batch does not stream", "body.stream")
        if self._changes or "model" not in body:
            body = {"model": self._model, **self._spec.params, **body}
        self._finish(url, body)
        try:
            identity = custom_id.encode()
        except UnicodeEncodeError:
            raise _Wrong("invalid_custom_id", "custom_id is not UTF-8", "custom_id") from None
        if not self._seen.add(hash(custom_id)):
            raise _Wrong(
                "duplicate_custom_id",
                f"custom_id {custom_id!r} stood in an earlier row",
                "custom_id",
            )
        return self._row(number, custom_id, url, body, identity)

    def _plain(self, value: dict[str, Any]) -> dict[str, Any]:
        """A body from a row of columns."""
        spec = self._spec
        extra: dict[str, Any] = {}
        own = value.get("params")
        if isinstance(own, dict):
            extra.update(own)
        for name in spec.param_columns:
            if value.get(name) is not None:
                extra[name] = _number(value[name])
        if extra.get("stream"):
            raise _Wrong("stream", "stream is true; a batch does not stream", "params.stream")
        if (pairs := PAIR_FIELDS.get(self._url)) is not None:
            for names in pairs:
                if all(value.get(name) is not None for name in names):
                    return {
                        "model": self._model,
                        **spec.params,
                        **extra,
                        **{n: value[n] for n in names},
                    }
            raise _Wrong(
                "missing_column",
                f"needs {' or '.join(' and '.join(n) for n in pairs)}",
                pairs[0][0],
            )
        if self._template is not None:
            return self._prompt(self._template.fill(value), extra)
        names = (spec.prompt_column,) if spec.prompt_column else PROMPT_COLUMNS
        for name in names:
            if name in value:
                if value[name] is None:
                    raise _Wrong("null_prompt", f"column {name} is null", name)
                return self._prompt(value[name], extra, name)
        raise _Wrong("missing_column", f"no column {' or '.join(names)}", names[0])

    def _prompt(
        self, prompt: Any, extra: dict[str, Any] | None = None, field: str = "prompt"
    ) -> dict[str, Any]:
        """A body from a prompt: text, messages or token ids."""
        url = self._url
        name = BODY_FIELDS.get(url)
        if name is None:
            raise _Wrong(
                "invalid_row", f"{url} needs rows with columns, not {_kind(prompt)}", field
            )
        if url == CHAT and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif not isinstance(prompt, (str, list)):
            raise _Wrong("invalid_prompt", f"{field} is {_kind(prompt)}, not text or a list", field)
        body = {"model": self._model, **self._spec.params, **(extra or {}), name: prompt}
        self._finish(url, body)
        return body

    def _finish(self, url: str, body: dict[str, Any]) -> None:
        """What every generating row gets: checks of its prompt, the system prompt, the schema."""
        if url == CHAT:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise _Wrong("invalid_messages", "messages is missing or empty", "messages")
            for message in messages:
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise _Wrong(
                        "invalid_messages",
                        "every message must be an object with a role",
                        "messages",
                    )
            if self._spec.system_prompt is not None and messages[0]["role"] != "system":
                body["messages"] = [
                    {"role": "system", "content": self._spec.system_prompt},
                    *messages,
                ]
        elif (name := BODY_FIELDS.get(url)) is not None:
            if not body.get(name):
                raise _Wrong("invalid_prompt", f"{name} is missing or empty", name)
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


def prepare(row: Row, body: dict[str, Any]) -> None:
    """Note on a row what it shares with others (`params`) and what is its own (`prompt`), where it may be packed."""
    if row.url not in PACKABLE or not ALONE.isdisjoint(body):
        return
    name = BODY_FIELDS[row.url]
    prompt = body[name]
    if row.url != CHAT and not isinstance(prompt, str):
        return
    rest = {key: value for key, value in body.items() if key != name}
    row.prompt, row.params = prompt, orjson.dumps(rest)


class Template:
    """`"Summarise {title}: {text}"`; `{{` and `}}` are braces. Only plain column names, no attributes or indexes."""

    def __init__(self, text: str) -> None:
        try:
            self._parts = [
                (literal, name, conversion, spec or "")
                for literal, name, spec, conversion in string.Formatter().parse(text)
            ]
        except ValueError as error:
            raise InvalidInput(
                f"prompt_template: {error}; write {{{{ and }}}} for braces that stay"
            ) from error
        names = [name for _, name, _, _ in self._parts if name is not None]
        if not names:
            raise InvalidInput("prompt_template names no column, so every prompt would be the same")
        for name in names:
            if not name or "." in name or "[" in name:
                raise InvalidInput(f"prompt_template: {{{name}}} is not a column name")

    def fill(self, columns: dict[str, Any]) -> str:
        out = []
        for literal, name, conversion, spec in self._parts:
            out.append(literal)
            if name is None:
                continue
            if name not in columns:
                raise _Wrong("missing_column", f"column {name} of prompt_template is missing", name)
            value = columns[name]
            if value is None:
                raise _Wrong("null_prompt", f"column {name} of prompt_template is null", name)
            value = repr(value) if conversion == "r" else value
            try:
                out.append(
                    format(value, spec)
                    if spec or not isinstance(value, (dict, list))
                    else _json(value)
                )
            except (TypeError, ValueError) as error:
                raise _Wrong(
                    "invalid_value", f"column {name} cannot be formatted: {error}", name
                ) from None
        return "".join(out)


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise _Wrong("invalid_value", f"cannot be written as JSON: {error}") from None


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
