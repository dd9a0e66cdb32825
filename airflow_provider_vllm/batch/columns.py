"""The input's rows and their answers in, a table with two more columns out: JSONL, CSV or Parquet.

The input is read a second time, beside the journal, so that no column has to be kept in memory. Invariants:
every row of the input is in the output, in order; a failed one has a null answer and says why.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import orjson

from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.api import EMBEDDINGS, SCORE, answer_of
from airflow_provider_vllm.batch.csv_rows import CsvWriter
from airflow_provider_vllm.batch.exact import loads
from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.parquet_rows import BATCH, ROWS
from airflow_provider_vllm.batch.parquet_tables import (
    nullable,
    parquet_schema,
    parquet_tables,
    pyarrow_for_output,
)
from airflow_provider_vllm.batch.records import value_of
from airflow_provider_vllm.batch.source import Damaged, RecordError, Source
from airflow_provider_vllm.batch.sources import ToPath, records
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.texts import as_json, text_of
from airflow_provider_vllm.exceptions import BatchFailed, InvalidPrompts

PUT_BACK = (
    "every answer is kept in the journal; put the input back, or leave it as it is now, and retry"
)
GIVEN = frozenset(["messages", "prompt"])  # the columns of rows that are no columns themselves
End = tuple[Any, "str | None"]


class Unfit(Exception):
    """A value that its Parquet column cannot hold; the message names row and column."""


def check_columns(spec: BatchSpec, sources: tuple[Source, ...]) -> None:
    """The added columns must not be there already, in any row. Raises InvalidPrompts."""
    if spec.output_path is None or spec.form != "columns":
        return
    if spec.suffix == ".parquet":
        pyarrow_for_output()
        if _all_parquet(sources):
            parquet_schema(sources)
    added = (spec.answer_column, spec.error_column)
    for source, line, value in _heads(spec, sources, added):
        for name in added:
            if name in value:
                raise InvalidPrompts(
                    f"the input has a column {name} already ({source}, row {line}); "
                    "set answer_column or error_column to another name"
                )


def _heads(
    spec: BatchSpec, sources: tuple[Source, ...], added: tuple[str, str]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The rows that may have an added column: where all have the same the first, of lines those that hold the name."""
    marks = [b"\\u", *(name.encode() for name in added)]
    if not GIVEN.isdisjoint(added):
        marks = [b""]  # in every row
    parts: list[tuple[Source, ...]] = [(source,) for source in sources]
    for part in parts or [()]:
        alike = bool(part) and part[0].format in ("csv", "parquet", "text")
        for source, line, value in records(spec, part):
            if isinstance(value, bytes) and not any(mark in value for mark in marks):
                continue
            yield source, line, _columns(value)
            if alike and not isinstance(value, RecordError):
                break


def columns_of_records(spec: BatchSpec, sources: tuple[Source, ...]) -> Iterator[dict[str, Any]]:
    """Each record as columns; a broken one has none."""
    return (_columns(value) for _, _, value in records(spec, sources))


def _columns(value: Any) -> dict[str, Any]:
    if isinstance(value, bytes):
        try:
            value = loads(value)
        except orjson.JSONDecodeError:
            return {}
    if isinstance(value, RecordError):
        return value.columns
    if isinstance(value, dict):
        return value
    return {"messages" if isinstance(value, list) else "prompt": value}


def ends(journal: Journal, rows: int) -> Iterator[End]:
    """Answer and error of every row, one of them null; the error has the text of an answer that breaks the schema."""
    for record in results.records(journal, rows):
        line = value_of(record.line)
        if record.outcome == "ok":
            yield answer_of(line["response"]["body"]), None
            continue
        message = line["error"]["message"]
        if (text := results.raw_text(record.outcome, line)) is not None:
            message = f"{message}; the answer was: {text}"
        yield None, message


def write_columns(
    spec: BatchSpec,
    sources: tuple[Source, ...],
    journal: Journal,
    rows: int,
    to_path: ToPath,
    before: Callable[[], None],
) -> None:
    """The output file; `before` as in `results.replacing`.

    Raises BatchFailed where the input has another number of rows than were sent, or a value fits in no column.
    """
    assert spec.output_path is not None
    with results.replacing(spec.output_path, to_path, before, journal.size()) as file:
        try:
            written = _write(spec, sources, journal, rows, file)
        except (InvalidPrompts, Damaged) as error:
            raise BatchFailed(f"the input cannot be read again: {error}; {PUT_BACK}") from error
        if written != rows:
            raise BatchFailed(
                f"the input had {rows} rows when it was sent and has {written} now; it was changed while "
                f"the batch ran; {PUT_BACK}"
            )


def _write(
    spec: BatchSpec, sources: tuple[Source, ...], journal: Journal, rows: int, file: Any
) -> int:
    """How many rows were written. A Parquet file whose values fit in no typed column gets text columns."""
    if spec.suffix != ".parquet":
        with results.compressed(file, results.is_gz(str(spec.output_path))) as out:
            write = _write_csv if spec.suffix == ".csv" else _write_jsonl
            return write(spec, sources, ends(journal, rows), out)
    try:
        return _write_parquet(spec, sources, ends(journal, rows), file)
    except Unfit:
        file.seek(0)
        file.truncate()
    try:
        return _write_parquet(spec, sources, ends(journal, rows), file, as_text=True)
    except Unfit as error:
        raise BatchFailed(
            f"{error}; every answer is kept in the journal; name the output .jsonl and retry"
        ) from error


def _merged(
    spec: BatchSpec, sources: tuple[Source, ...], answers: Iterator[End]
) -> Iterator[dict[str, Any]]:
    for columns, (answer, error) in zip(columns_of_records(spec, sources), answers, strict=False):
        yield {**columns, spec.answer_column: answer, spec.error_column: error}


def _write_jsonl(
    spec: BatchSpec, sources: tuple[Source, ...], answers: Iterator[End], out: Any
) -> int:
    count = 0
    for row in _merged(spec, sources, answers):
        out.write(as_json(row) + b"\n")
        count += 1
    return count


def _write_csv(
    spec: BatchSpec, sources: tuple[Source, ...], answers: Iterator[End], out: Any
) -> int:
    header = [*_kinds(spec, sources), spec.answer_column, spec.error_column]
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=False)
    writer = CsvWriter(text)
    writer.row(header)
    count = 0
    for row in _merged(spec, sources, answers):
        writer.row([_cell(row.get(name)) for name in header])
        count += 1
    text.flush()
    text.detach()
    return count


def _cell(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else text_of(value)


def _kinds(spec: BatchSpec, sources: tuple[Source, ...]) -> dict[str, str]:
    """Name and kind (bool, int, float, str, json) of every column of the input, in order."""
    kinds: dict[str, str] = {}
    for row in columns_of_records(spec, sources):
        for name, value in row.items():
            kind = "null" if value is None else _kind(value)
            known = kinds.setdefault(name, kind)
            if kind not in (known, "null"):
                numbers = {known, kind} == {"int", "float"}
                kinds[name] = kind if known == "null" else "float" if numbers else "json"
    return kinds


def _kind(value: Any) -> str:
    """An integer that a column of 64 bits cannot hold is JSON."""
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return "json"
    return type(value).__name__


def _write_parquet(
    spec: BatchSpec,
    sources: tuple[Source, ...],
    answers: Iterator[End],
    out: Any,
    as_text: bool = False,
) -> int:
    pa = pyarrow_for_output()
    added = [
        pa.field(spec.answer_column, pa.string() if as_text else _answer_type(pa, spec)),
        pa.field(spec.error_column, pa.string()),
    ]
    tables: Iterable[Any]
    if _all_parquet(sources):
        schema = parquet_schema(sources)
        if as_text:
            schema = nullable(schema)
        tables = parquet_tables(pa, sources, schema)
    else:
        schema, tables = _made_tables(pa, spec, sources, as_text)
    count = 0
    with pa.parquet.ParquetWriter(out, pa.schema([*schema, *added], schema.metadata)) as writer:
        for table in tables:
            pairs = list(islice(answers, table.num_rows))
            first = count
            count += table.num_rows
            if len(pairs) < table.num_rows:
                break
            for index, field in enumerate(added):
                values = [pair[index] for pair in pairs]
                table = table.append_column(field, _array(pa, field, values, first))
            for field in table.schema:
                if not field.nullable and table.column(field.name).null_count:
                    raise Unfit(f"row {first + 1} or one after it: {field.name} may not be null")
            writer.write_table(table)
    return count


def _answer_type(pa: Any, spec: BatchSpec) -> Any:
    kinds = {EMBEDDINGS: pa.list_(pa.float32()), SCORE: pa.float64()}
    return kinds.get(spec.endpoint, pa.string())


def _array(pa: Any, field: Any, values: list[Any], first: int) -> Any:
    """A column; text columns take other values as JSON. `first` is the number of the first row, from 0."""
    if field.type == pa.string():
        values = [text_of(value) for value in values]
    try:
        return pa.array(values, field.type)
    except UNFIT:
        for number, value in enumerate(values):
            try:
                pa.array([value], field.type)
            except UNFIT as error:
                where = f"row {first + number + 1}, column {field.name}"
                raise Unfit(f"{where} does not fit in a column of {field.type}: {error}") from error
        raise


UNFIT = (ValueError, TypeError, OverflowError)  # pyarrow's own are ValueError or TypeError


def _all_parquet(sources: tuple[Source, ...]) -> bool:
    return bool(sources) and all(source.format == "parquet" for source in sources)


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """As many rows as a group has, and fewer of large ones."""
    chunk: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, str))
        if len(chunk) == ROWS or size > BATCH:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _made_tables(
    pa: Any, spec: BatchSpec, sources: tuple[Source, ...], as_text: bool
) -> tuple[Any, Iterable[Any]]:
    types = {} if as_text else {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
    kinds = _kinds(spec, sources) or {
        "prompt": "str"
    }  # no record could be read, and no table is without columns
    schema = pa.schema(
        [pa.field(name, types.get(kind, pa.string())) for name, kind in kinds.items()]
    )

    def tables() -> Iterator[Any]:
        first = 0
        for chunk in _chunks(columns_of_records(spec, sources)):
            arrays = [
                _array(pa, field, [row.get(field.name) for row in chunk], first) for field in schema
            ]
            first += len(chunk)
            yield pa.Table.from_arrays(arrays, schema=schema)

    return schema, tables()
