"""The input's rows and their answers in, a table with two more columns out: JSONL, CSV or Parquet.

The input is read a second time, beside the journal, so that no column has to be kept in memory. Invariants:
every row of the input is in the output, in order; a failed one has a null answer and says why.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import orjson

from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.api import CLASSIFY, EMBEDDINGS, SCORE, answer_of
from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.sources import (
    RecordError,
    Source,
    ToPath,
    parquet_file,
    records,
)
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed, InvalidPrompts

ROWS_A_GROUP = 1024
End = tuple[Any, "str | None"]


def check_columns(spec: BatchSpec, sources: tuple[Source, ...]) -> None:
    """The added columns must not be there already. Raises InvalidPrompts."""
    if spec.output_path is None or spec.form != "columns":
        return
    if spec.suffix == ".parquet":
        _pyarrow()
    first = next(iter(columns_of_records(spec, sources)), {})
    for name in (spec.answer_column, spec.error_column):
        if name in first:
            raise InvalidPrompts(
                f"the input has a column {name} already; set answer_column or error_column to another name"
            )


def columns_of_records(spec: BatchSpec, sources: tuple[Source, ...]) -> Iterator[dict[str, Any]]:
    """Each record as columns; a broken one has none."""
    for _, _, value in records(spec, sources):
        if isinstance(value, bytes):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError:
                value = RecordError("invalid_json", "not JSON")
        if isinstance(value, RecordError):
            yield {}
        elif isinstance(value, dict):
            yield value
        else:
            yield {"messages" if isinstance(value, list) else "prompt": value}


def ends(journal: Journal, rows: int) -> Iterator[End]:
    """Answer and error of every row, one of them null."""
    for record in results.records(journal, rows):
        line = orjson.loads(record.line)
        if record.outcome == "ok":
            yield answer_of(line["response"]["body"]), None
        else:
            yield None, line["error"]["message"]


def write_columns(
    spec: BatchSpec,
    sources: tuple[Source, ...],
    journal: Journal,
    rows: int,
    to_path: ToPath,
    before: Callable[[], None],
) -> None:
    """The output file; `before` as in `results.replacing`.

    Raises BatchFailed where the input has changed since it was read first.
    """
    assert spec.output_path is not None
    with results.replacing(spec.output_path, to_path, before) as file:
        answers = ends(journal, rows)
        if spec.suffix == ".parquet":
            written = _write_parquet(spec, sources, answers, file)
        else:
            with results.compressed(file, results.is_gz(spec.output_path)) as out:
                write = _write_csv if spec.suffix == ".csv" else _write_jsonl
                written = write(spec, sources, answers, out)
        if written != rows:
            raise BatchFailed(
                f"the input had {rows} rows when it was sent and has {written} now; it was changed while "
                "the batch ran. Every answer is kept in the journal; put the input back and retry"
            )


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
        out.write(orjson.dumps(row, default=str) + b"\n")
        count += 1
    return count


def _write_csv(
    spec: BatchSpec, sources: tuple[Source, ...], answers: Iterator[End], out: Any
) -> int:
    header = [*_kinds(spec, sources), spec.answer_column, spec.error_column]
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=False)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    count = 0
    for row in _merged(spec, sources, answers):
        writer.writerow([_cell(row.get(name)) for name in header])
        count += 1
    text.flush()
    text.detach()
    return count


def _cell(value: Any) -> Any:
    return orjson.dumps(value).decode() if isinstance(value, (dict, list)) else value


def _kinds(spec: BatchSpec, sources: tuple[Source, ...]) -> dict[str, str]:
    """Name and kind (bool, int, float, str, json) of every column of the input, in order."""
    kinds: dict[str, str] = {}
    for row in columns_of_records(spec, sources):
        for name, value in row.items():
            kind = "null" if value is None else type(value).__name__
            known = kinds.setdefault(name, kind)
            if kind not in (known, "null"):
                numbers = {known, kind} == {"int", "float"}
                kinds[name] = kind if known == "null" else "float" if numbers else "json"
    return kinds


def _pyarrow() -> Any:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise InvalidPrompts(
            "a Parquet output needs pyarrow, which is not installed; install the extra [parquet]"
        ) from None
    return pyarrow


def _write_parquet(
    spec: BatchSpec, sources: tuple[Source, ...], answers: Iterator[End], out: Any
) -> int:
    pa = _pyarrow()
    added = [
        pa.field(spec.answer_column, _answer_type(pa, spec)),
        pa.field(spec.error_column, pa.string()),
    ]
    if sources and all(source.format == "parquet" for source in sources):
        schema, tables = _parquet_tables(pa, sources)
    else:
        schema, tables = _made_tables(pa, spec, sources)
    count = 0
    with pa.parquet.ParquetWriter(out, pa.schema([*schema, *added], schema.metadata)) as writer:
        for table in tables:
            pairs = list(islice(answers, table.num_rows))
            count += table.num_rows
            if len(pairs) < table.num_rows:
                break
            for index, field in enumerate(added):
                values = [_typed(pa, pair[index], field.type) for pair in pairs]
                table = table.append_column(field, pa.array(values, field.type))
            writer.write_table(table)
    return count


def _answer_type(pa: Any, spec: BatchSpec) -> Any:
    kinds = {EMBEDDINGS: pa.list_(pa.float32()), SCORE: pa.float64(), CLASSIFY: pa.string()}
    return kinds.get(spec.endpoint, pa.string())


def _typed(pa: Any, value: Any, kind: Any) -> Any:
    """Text columns take other values as JSON."""
    return _text(value) if kind == pa.string() else value


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value, default=str).decode()


def _parquet_tables(pa: Any, sources: tuple[Source, ...]) -> tuple[Any, Iterable[Any]]:
    with sources[0].open() as raw, parquet_file(sources[0], raw) as file:
        schema = file.schema_arrow

    def tables() -> Iterator[Any]:
        for source in sources:
            with source.open() as raw, parquet_file(source, raw) as file:
                for batch in file.iter_batches(batch_size=ROWS_A_GROUP):
                    yield pa.Table.from_batches([batch]).cast(schema)

    return schema, tables()


def _made_tables(
    pa: Any, spec: BatchSpec, sources: tuple[Source, ...]
) -> tuple[Any, Iterable[Any]]:
    types = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
    kinds = _kinds(spec, sources)
    schema = pa.schema(
        [pa.field(name, types.get(kind, pa.string())) for name, kind in kinds.items()]
    )

    def tables() -> Iterator[Any]:
        rows = columns_of_records(spec, sources)
        while chunk := list(islice(rows, ROWS_A_GROUP)):
            arrays = [
                pa.array([_typed(pa, row.get(field.name), field.type) for row in chunk], field.type)
                for field in schema
            ]
            yield pa.Table.from_arrays(arrays, schema=schema)

    return schema, tables()
