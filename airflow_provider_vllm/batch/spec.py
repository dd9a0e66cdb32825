"""What one batch is: where its rows come from, how they are sent, where the answers go.

Enters: the arguments of a user. Leaves: a frozen, validated `BatchSpec`.
Invariant: a `BatchSpec` that exists is consistent in itself; whether its files exist is `run.check_inputs`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from airflow_provider_vllm.batch.api import ALIASES, CHAT, GENERATING, NAMES, RESPONSES
from airflow_provider_vllm.batch.parameters import check_values
from airflow_provider_vllm.batch.values import is_empty, is_utf8
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts
from airflow_provider_vllm.names import type_of

NOT_WRITTEN = frozenset(
    [".arrow", ".avro", ".bz2", ".feather", ".orc", ".tsv", ".xls", ".xlsx", ".xz", ".zip", ".zst"]
)
FORMATS = ("jsonl", "csv", "parquet", "text")
MAX_CONCURRENCY = 4096
MAX_PACK = 256


@dataclass(frozen=True)
class BatchSpec:
    """One batch. Exactly one of `prompts` and `input_path` is given.

    prompts           list of strings, chat message lists, plain row objects or OpenAI batch rows
    input_path        path, URL or glob, or a list of them: JSONL, CSV, Parquet or text, `.gz` allowed
    output_path       results file; its suffix gives its form. Needed with `input_path`
    errors_path       OpenAI error rows; default: beside the output, `<name>.<suffix>.errors.jsonl`
    endpoint          URL path or short name: chat, completions, embeddings, score, rerank, classify, pooling, responses
    params            sampling parameters of every row; a row's own win
    model             name to send (a LoRA's, for example); default: the endpoint's
    system_prompt     first message of every chat row that has none
    extra_roles       roles of messages that the model's chat template has beside OpenAI's
    prompt_template   `"Summarise: {text}"`, filled from the columns of a row
    prompt_column     column that holds the prompt; default: `prompt`, `messages`, `text` or `input`
    param_columns     columns that are parameters of their row (`temperature`, `max_tokens`, ...)
    output_schema     JSON schema or Pydantic class: asked of the server, and checked in the answer
    input_format      jsonl, csv, parquet, text; default: by suffix
    output_format     openai (batch results) or columns (added to the input's); default: by suffix
    answer_column     name of the added column with the answer; `error_column` likewise
    concurrency       rows in flight, or "auto"
    pack              rows per request, or "auto"; 1 sends each alone
    request_timeout   seconds for one request, queueing on the server included
    max_retries       further tries of a row after a transient failure
    max_error_rate    part of the rows that may fail before the batch fails; `max_errors` a number of rows
    on_changed_input  what to do when an earlier try worked on other rows or parameters
    stall_timeout     seconds without any movement after which the server is probed; `probe_timeout` its deadline
    progress_interval seconds between progress lines
    journal_sync      seconds between two fsyncs of the journal, and between the parts of a remote one
    max_row_bytes     a longer input row is an error row
    row_offset        number of the first row, for shards
    """

    prompts: Sequence[Any] | None = None
    input_path: str | Sequence[str] | None = None
    output_path: str | None = None
    errors_path: str | None = None
    endpoint: str = "/v1/chat/completions"
    params: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    system_prompt: str | None = None
    extra_roles: Sequence[str] = ()
    prompt_template: str | None = None
    prompt_column: str | None = None
    param_columns: Sequence[str] = ()
    output_schema: Any = None
    input_format: str | None = None
    output_format: Literal["openai", "columns"] | None = None
    answer_column: str = "response"
    error_column: str = "error"
    concurrency: int | Literal["auto"] = "auto"
    pack: int | Literal["auto"] = "auto"
    request_timeout: float = 600.0
    max_retries: int = 5
    max_error_rate: float = 0.1
    max_errors: int | None = None
    on_changed_input: Literal["rerun", "fail"] = "rerun"
    stall_timeout: float = 60.0
    probe_timeout: float = 30.0
    progress_interval: float = 5.0
    journal_sync: float = 2.0
    max_row_bytes: int = 8 * 1024 * 1024
    row_offset: int = 0

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "endpoint", _endpoint(self.endpoint))
        set_(self, "params", _params(self.params))
        check_values(self.params)
        set_(self, "input_path", _paths(self.input_path))
        set_(self, "param_columns", _names("param_columns", self.param_columns))
        set_(self, "extra_roles", _names("extra_roles", self.extra_roles))
        for name in ("output_path", "errors_path"):
            if hasattr(path := getattr(self, name), "__fspath__"):
                set_(self, name, str(path))
        _one_source(self)
        set_(self, "prompts", _prompts(self.prompts))
        for name in ("output_path", "errors_path", "model", "prompt_template", "prompt_column"):
            _optional_text(name, getattr(self, name))
        for name in ("output_path", "errors_path"):
            _path_text(name, getattr(self, name) or "")
        for name in ("answer_column", "error_column"):
            _text(name, getattr(self, name))
        _system_prompt(self)
        _choices(self)
        _numbers(self)
        _output(self)
        _schema(self)

    @property
    def paths(self) -> tuple[str, ...]:
        """The input paths, unexpanded; empty for prompts from a list."""
        return tuple(self.input_path or ())

    @property
    def suffix(self) -> str:
        """Suffix of the output as `suffix_of` gives it; empty without an output."""
        return suffix_of(self.output_path or "")

    @property
    def form(self) -> str:
        """`openai` or `columns`."""
        table = self.suffix in (".csv", ".parquet")
        return self.output_format or ("columns" if table else "openai")

    def fingerprint(self, model: str, server: str = "") -> str:
        """Hex digest of everything that decides what is answered to a given input.

        `model` is the endpoint's, `server` its fingerprint, where it has one.
        """
        parts = {
            "endpoint": self.endpoint,
            "params": self.params,
            "model": self.model or model,
            "system_prompt": self.system_prompt,
            "prompt_template": self.prompt_template,
            "prompt_column": self.prompt_column,
            "param_columns": list(self.param_columns),
            "output_schema": schema_of(self.output_schema),
        }
        if server:
            parts["server"] = server
        text = json.dumps(parts, sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def replace(self, **changes: Any) -> BatchSpec:
        """A copy with other values, validated again."""
        return dataclasses.replace(self, **changes)


def suffix_of(path: str) -> str:
    """What says the form of a file: its suffix without `.gz`, lower case, one for each form."""
    name = path.lower().removesuffix(".gz").rsplit("/", 1)[-1]
    suffix = name[name.rfind(".") :] if "." in name else ""
    return ".parquet" if suffix == ".pq" else suffix


def schema_of(output_schema: Any) -> dict[str, Any] | None:
    """The JSON schema of a schema dict or a Pydantic class. Raises InvalidInput for anything else."""
    if output_schema is None:
        return None
    if isinstance(output_schema, Mapping):
        return dict(output_schema)
    make = getattr(output_schema, "model_json_schema", None)
    if not callable(make):
        raise InvalidInput(
            f"output_schema is {type_of(output_schema)}; give a JSON schema (dict) or a Pydantic class"
        )
    try:
        return dict(make())
    except Exception as error:  # a type that JSON does not have, a name that is not defined yet
        raise InvalidInput(f"output_schema makes no JSON schema: {error}") from error


def _endpoint(value: Any) -> str:
    if not isinstance(value, str) or value.lower().rstrip("/") not in ALIASES:
        raise InvalidInput(
            f"endpoint {value!r} is not known; use one of {', '.join(NAMES)} or their URL paths"
        )
    return ALIASES[value.lower().rstrip("/")]


def _params(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise InvalidInput(f"params must be an object with text keys, not {type(value).__name__}")
    if not is_empty(value.get("stream")):
        raise InvalidInput("params.stream: a batch does not stream; leave it out")
    for name, cell in value.items():
        if isinstance(cell, float) and not math.isfinite(cell):
            raise InvalidInput(f"params.{name} is {cell}, which no request can say")
        try:
            orjson.dumps(cell, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:  # orjson's JSONEncodeError is one
            raise InvalidInput(f"params.{name} cannot be sent as JSON: {error}") from None
    return dict(value)


def _paths(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = [value] if isinstance(value, str) or hasattr(value, "__fspath__") else value
    if not isinstance(items, Sequence) or not items:
        raise InvalidPrompts(f"input_path must be a path or a list of paths, not {value!r}")
    texts = tuple(str(item) for item in items)
    if any(not text.strip() for text in texts):
        raise InvalidPrompts("input_path holds an empty path")
    for text in texts:
        _path_text("input_path", text)
    return texts


def _path_text(name: str, text: str) -> None:
    """A path is written down in JSON, and no file system has a NUL in one."""
    if "\0" in text or not is_utf8(text):
        raise InvalidPrompts(f"{name} {text!r} is not UTF-8 without NUL; name another file")


def _names(name: str, value: Any) -> tuple[str, ...]:
    whole = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not whole or not all(isinstance(item, str) and item for item in value):
        raise InvalidInput(f"{name} must be a list of names, not {value!r}")
    return tuple(value)


def _one_source(spec: BatchSpec) -> None:
    if (spec.prompts is None) == (spec.input_path is None):
        given = "both were" if spec.prompts is not None else "neither was"
        raise InvalidPrompts(f"give either prompts or input_path; {given} given")


def _prompts(prompts: Any) -> Sequence[Any] | None:
    """As a list where they come from a mapped task, which hands them out one by one."""
    if prompts is None:
        return None
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise InvalidPrompts(
            f"prompts must be a list, not {type(prompts).__name__}; a single prompt goes in a list of one"
        )
    if not prompts:
        raise InvalidPrompts("prompts is an empty list; skip the task when there is nothing to do")
    return prompts if isinstance(prompts, (list, tuple)) else list(prompts)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{name} must be text, not {value!r}")


def _optional_text(name: str, value: Any) -> None:
    if value is not None:
        _text(name, value)


def _system_prompt(spec: BatchSpec) -> None:
    if spec.system_prompt is None:
        return
    if not isinstance(spec.system_prompt, str):
        raise InvalidInput("system_prompt must be text")
    if spec.endpoint not in (CHAT, RESPONSES):
        raise InvalidInput(f"system_prompt needs a chat endpoint; {spec.endpoint} has no messages")


def _schema(spec: BatchSpec) -> None:
    schema = schema_of(spec.output_schema)
    if schema is not None and spec.endpoint not in GENERATING:
        raise InvalidInput(
            f"output_schema needs an endpoint that writes text; {spec.endpoint} does not"
        )
    try:
        orjson.dumps(schema)
    except TypeError as error:
        raise InvalidInput(f"output_schema cannot be sent as JSON: {error}") from None


def _choices(spec: BatchSpec) -> None:
    for name, allowed in (
        ("input_format", (None, *FORMATS)),
        ("output_format", (None, "openai", "columns")),
        ("on_changed_input", ("rerun", "fail")),
    ):
        value = getattr(spec, name)
        if not isinstance(value, str | None) or value not in allowed:
            known = ", ".join(str(item) for item in allowed if item)
            raise InvalidInput(f"{name} is {value!r}; use one of {known}")
    for name, most in (("concurrency", MAX_CONCURRENCY), ("pack", MAX_PACK)):
        value = getattr(spec, name)
        if isinstance(value, str) and value == "auto":
            continue
        if not (_is_int(value) and 1 <= value <= most):
            raise InvalidInput(f'{name} is {value!r}; use "auto" or a number from 1 to {most}')


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(spec: BatchSpec) -> None:
    for name in (
        "request_timeout",
        "stall_timeout",
        "probe_timeout",
        "progress_interval",
        "journal_sync",
    ):
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise InvalidInput(f"{name} is {value!r}; use seconds greater than 0")
    for name, least in (("max_retries", 0), ("max_row_bytes", 1024), ("row_offset", 0)):
        value = getattr(spec, name)
        if not _is_int(value) or value < least:
            raise InvalidInput(f"{name} is {value!r}; use a number from {least}")
    rate = spec.max_error_rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise InvalidInput(f"max_error_rate is {rate!r}; use a part between 0 and 1")
    if spec.max_errors is not None and (not _is_int(spec.max_errors) or spec.max_errors < 0):
        raise InvalidInput(f"max_errors is {spec.max_errors!r}; use a number from 0, or None")


def _output(spec: BatchSpec) -> None:
    if spec.input_path is not None and spec.output_path is None:
        raise InvalidPrompts("output_path is missing: answers to a file of prompts go to a file")
    if spec.output_path is not None and spec.output_path in spec.paths:
        raise InvalidPrompts(
            f"output_path is the input {spec.output_path}: it would be overwritten; name another file"
        )
    if spec.suffix in NOT_WRITTEN:
        raise InvalidInput(
            f"output_path {spec.output_path}: {spec.suffix} is not written; name it .jsonl, .csv or .parquet"
        )
    if spec.suffix == ".csv" and spec.form == "openai":
        raise InvalidInput(
            "output_format openai is JSON lines; name the output .jsonl, or use columns"
        )
    if spec.suffix == ".parquet" and (
        spec.form == "openai" or (spec.output_path or "").lower().endswith(".gz")
    ):
        raise InvalidInput(
            "a Parquet output holds columns and is not gzipped; name the output .parquet"
        )
    if spec.answer_column == spec.error_column:
        raise InvalidInput("answer_column and error_column have the same name")
