"""Parquet files in; their columns as one schema, and their rows as tables of it, out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from airflow_provider_vllm.batch.parquet_rows import (
    ROWS,
    Damage,
    parquet_file,
    parquet_parts,
    values_of,
)
from airflow_provider_vllm.batch.source import Source
from airflow_provider_vllm.batch.texts import text_of
from airflow_provider_vllm.exceptions import InvalidPrompts


def pyarrow_for_output() -> Any:
    """The package. Raises InvalidPrompts where it is not installed."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise InvalidPrompts(
            "a Parquet output needs pyarrow, which is not installed; install the extra [parquet]"
        ) from None
    return pyarrow


def nullable(schema: Any) -> Any:
    """The same columns, where each may be null."""
    fields = [field.with_nullable(True) for field in schema]
    return pyarrow_for_output().schema(fields, schema.metadata)


def parquet_schema(sources: tuple[Source, ...]) -> Any:
    """The columns of all files. Raises InvalidPrompts where a column has several types."""
    (_, schema), *others = runs_of_equal_types(sources)
    if others:
        (source, *_), _ = others[0]
        raise InvalidPrompts(
            f"input_path {source.name} has other types than {sources[0].name}, which one Parquet output cannot "
            "hold; make them equal, or name the output .jsonl"
        )
    return schema


def runs_of_equal_types(sources: tuple[Source, ...]) -> list[tuple[list[Source], Any]]:
    """Files one after the other whose columns have one type each, and the schema that they share."""
    pa = pyarrow_for_output()
    runs: list[tuple[list[Source], Any]] = []
    for source in sources:
        with source.open() as raw, parquet_file(source, raw) as file:
            own = file.schema_arrow
        if runs:
            alike, schema = runs[-1]
            try:
                both = pa.unify_schemas([nullable(schema), nullable(own)])
            except (pa.ArrowException, ValueError, TypeError):
                pass
            else:
                runs[-1] = ([*alike, source], both)
                continue
        runs.append(([source], own))
    return runs


def common_schema(sources: tuple[Source, ...], *, numbers_as_text: bool = False) -> Any:
    """Every column of any file: its one type, a float for several kinds of numbers, else text.

    Which type a column has can depend on the rows of a shard: without a value it is text there.
    """
    pa = pyarrow_for_output()
    types: dict[str, list[Any]] = {}
    for source in sources:
        with source.open() as raw, parquet_file(source, raw) as file:
            for field in file.schema_arrow:
                found = types.setdefault(field.name, [])
                if field.type not in found and not _has_no_value(file.metadata, field):
                    found.append(field.type)
    numbers = [pa.int64(), pa.float64()]

    def one(found: list[Any]) -> Any:
        if len(found) == 1:
            return found[0]
        is_number = found and all(each in numbers for each in found) and not numbers_as_text
        return pa.float64() if is_number else pa.string()

    return pa.schema([(name, one(found)) for name, found in types.items()])


def _has_no_value(metadata: Any, field: Any) -> bool:
    """Whether a column of text is null in every row."""
    if field.type != pyarrow_for_output().string():
        return False
    leaves = [metadata.schema.column(at).path for at in range(len(metadata.schema))]
    at = leaves.index(field.name)
    for group in range(metadata.num_row_groups):
        column = metadata.row_group(group).column(at)
        if not column.is_stats_set or column.statistics.null_count != column.num_values:
            return False
    return True


def parquet_tables(
    pa: Any,
    sources: tuple[Source, ...],
    schema: Any,
    damaged: Callable[[Source, Damage], None] | None = None,
) -> Iterator[Any]:
    """Tables of one schema: a column that a file lacks is null, and so is a damaged row, of which `damaged` is told."""
    for source in sources:
        for batch in parquet_parts(source, ROWS):
            if isinstance(batch, Damage):
                if damaged is not None:
                    damaged(source, batch)
                yield schema.empty_table().take(pa.nulls(batch.rows, pa.int64()))
                continue
            columns = [
                _as_type(pa, batch.column(field.name), field.type)
                if field.name in batch.schema.names
                else pa.nulls(batch.num_rows, field.type)
                for field in schema
            ]
            yield pa.Table.from_arrays(columns, schema=schema)


def _as_type(pa: Any, column: Any, wanted: Any) -> Any:
    """Text of other values is that of any output; Arrow's own drops the `.0` of a float, for one."""
    if (
        wanted != pa.string()
        or pa.types.is_string(column.type)
        or pa.types.is_large_string(column.type)
    ):
        return column.cast(wanted)
    return pa.array([text_of(value) for value in values_of(column)], wanted)
