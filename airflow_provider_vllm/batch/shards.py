"""One input in, shards of it out, and the results of the shards back into one: for mapped tasks.

    shards = task(split)("prompts.jsonl", "work/", shards=4)   # [{"input_path": ..., "row_offset": ...}, ...]
    parts = VllmBatchOperator.partial(..., output_path="work/{{ ti.map_index }}.jsonl").expand_kwargs(shards)
    task(merge)(parts.output, "answers.jsonl")

Invariants: shards are consecutive parts, so that merging in their order keeps the input's; `row_offset`
keeps the ids that rows without a `custom_id` get as they would be without shards.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.csv_rows import CsvWriter, csv_rows
from airflow_provider_vllm.batch.parquet_tables import nullable, parquet_schema, parquet_tables
from airflow_provider_vllm.batch.source import Source
from airflow_provider_vllm.batch.sources import (
    ToPath,
    csv_header,
    find_sources,
    local_path,
    records,
)
from airflow_provider_vllm.batch.spec import BatchSpec, suffix_of
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts

CARRIED = 1 << 26  # characters of one CSV record
SUFFIX = {"jsonl": ".jsonl", "text": ".txt", "csv": ".csv", "parquet": ".parquet"}


def split(
    input_path: str | Sequence[str],
    output_dir: str,
    *,
    shards: int,
    input_format: str | None = None,
    to_path: ToPath = local_path,
) -> list[dict[str, Any]]:
    """Write the input as up to `shards` files of nearly equal row counts into `output_dir`.

    Returns arguments for one batch each: `input_path`, `row_offset`. Raises InvalidPrompts for an input that
    cannot be read, or files of different formats.
    """
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise InvalidInput(f"shards is {shards!r}; use a number from 1")
    spec = BatchSpec(input_path=input_path, output_path="unused", input_format=input_format)
    sources = find_sources(spec, to_path)
    formats = {source.format for source in sources}
    if len(formats) > 1:
        raise InvalidPrompts(
            f"input_path holds files of several formats: {', '.join(sorted(formats))}"
        )
    rows = sum(1 for _ in records(spec, sources))
    if not rows:
        raise InvalidPrompts(f"input_path {', '.join(spec.paths)} holds no rows: nothing to split")
    folder = to_path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    kind = formats.pop()
    pieces = {"csv": _csv_pieces, "parquet": _parquet_pieces}.get(kind, _line_pieces)
    made: list[dict[str, Any]] = []
    for index, (first, data) in enumerate(pieces(sources, _quota(rows, shards))):
        name = f"{str(output_dir).rstrip('/')}/shard-{index:04d}{SUFFIX[kind]}"
        with results.replacing(name, to_path) as file:
            for block in data:
                file.write(block)
        made.append({"input_path": name, "row_offset": first})
    return made


def _quota(rows: int, shards: int) -> int:
    return max(1, -(-rows // shards))


Piece = tuple[int, Iterator[bytes]]


def _line_pieces(sources: tuple[Source, ...], quota: int) -> Iterator[Piece]:
    """Cut only after a line that is not blank: at the end of a file, blank lines are no rows."""
    lines = _Peekable(line for source in sources for line in _whole_lines(source))
    count = 0
    while lines.has_more():
        first, taken = count, 0

        def piece() -> Iterator[bytes]:
            nonlocal taken
            blank = True
            while lines.has_more() and (taken < quota or blank):
                line = lines.take()
                blank = not line.strip()
                taken += 1
                yield line

        yield first, piece()
        count += taken


def _whole_lines(source: Source) -> Iterator[bytes]:
    """Lines with their end; blank ones only where another line of the file follows."""
    blanks: list[bytes] = []
    with source.open() as file:
        for number, line in enumerate(file):
            if number == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                blanks.append(b"\n")
                continue
            yield from blanks
            blanks.clear()
            yield line if line.endswith(b"\n") else line + b"\n"


class _Peekable:
    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._next: Any = next(items, None)

    def has_more(self) -> bool:
        return self._next is not None

    def take(self) -> Any:
        item, self._next = self._next, next(self._items, None)
        return item


def _csv_pieces(sources: tuple[Source, ...], quota: int) -> Iterator[Piece]:
    """Every record as it stands in its file, so that a broken one is broken in its shard too."""
    headers = [_csv_header(source) for source in sources]
    if any(header != headers[0] for header in headers):
        raise InvalidPrompts("the CSV files of input_path have different headers")
    rows = _Peekable(row for source in sources for row in _csv_records(source))
    count = 0
    while rows.has_more():
        first, taken = count, 0

        def piece() -> Iterator[bytes]:
            nonlocal taken
            yield _csv_line(headers[0])
            while rows.has_more() and taken < quota:
                taken += 1
                yield rows.take()

        yield first, piece()
        count += taken


def _csv_header(source: Source) -> list[str]:
    with csv_rows(source) as rows:
        return csv_header(source, rows)


def _csv_records(source: Source) -> Iterator[bytes]:
    with csv_rows(source, CARRIED) as rows:
        csv_header(source, rows)
        for line, _, wrong in rows:
            if wrong is not None and wrong[0] == "row_too_long":
                raise InvalidPrompts(
                    f"input_path {source.name}, line {line}: {wrong[1]}, which no shard takes; shorten it"
                )
            yield rows.raw().encode("utf-8", "surrogateescape")


def _csv_body(source: Source) -> Iterator[list[str]]:
    """The rows of an output of ours."""
    with csv_rows(source, CARRIED) as rows:
        csv_header(source, rows)
        yield from (cells for _, cells, _ in rows)


def _csv_line(cells: list[str]) -> bytes:
    text = io.StringIO()
    CsvWriter(text).row(cells)
    return text.getvalue().encode("utf-8", "surrogateescape")


def _parquet_pieces(sources: tuple[Source, ...], quota: int) -> Iterator[Piece]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    def finished(first: int, tables: list[Any]) -> Piece:
        out = io.BytesIO()
        parquet.write_table(pyarrow.concat_tables(tables), out)
        return first, iter([out.getvalue()])

    first, held = 0, 0
    tables: list[Any] = []
    for table in parquet_tables(pyarrow, sources, nullable(parquet_schema(sources))):
        while held + table.num_rows >= quota:
            part = table.slice(0, quota - held)
            table = table.slice(quota - held)
            yield finished(first, [*tables, part])
            first, held, tables = first + quota, 0, []
        if table.num_rows:
            tables.append(table)
            held += table.num_rows
    if tables:
        yield finished(first, tables)


def merge(
    manifests: Sequence[Mapping[str, Any]], output_path: str, *, to_path: ToPath = local_path
) -> dict[str, Any]:
    """Join the outputs and error files of shards, in the order given; their manifest as one.

    `manifests` are those of the shards' batches. Raises InvalidInput where one has no output.
    """
    manifests = list(
        manifests
    )  # a mapped task's outputs are fetched anew each time they are gone through
    if not manifests:
        raise InvalidInput("merge needs the manifest of at least one shard")
    outputs = [manifest.get("output_path") for manifest in manifests]
    if not all(outputs):
        raise InvalidInput(
            "merge: a shard's manifest has no output_path; its batch did not succeed"
        )
    errors = [m["errors_path"] for m in manifests if m.get("errors_path")]
    target = BatchSpec(prompts=["unused"], output_path=output_path)
    place = str(results.errors_path(target))
    for text, is_ours in (
        (place, results.holds_error_rows),
        (str(results.manifest_path(target)), results.is_manifest),
    ):
        if not is_ours(to_path(text)):
            raise InvalidInput(
                f"merge: {text} exists and no batch has written it; move it, or name another output"
            )
    errors_to = place if errors else None
    if errors_to:
        _join(errors, errors_to, to_path)
    else:
        results.remove_stale(place, to_path)
    _join([str(output) for output in outputs], output_path, to_path)
    whole = _summed(manifests, output_path, errors_to)
    with results.replacing(whole["manifest_path"], to_path) as file:
        file.write(orjson.dumps(whole, option=orjson.OPT_INDENT_2))
    return whole


def _join(parts: list[str], target: str, to_path: ToPath) -> None:
    suffixes = {suffix_of(part) for part in (*parts, target)}
    kinds = {suffix if suffix in (".csv", ".parquet") else ".jsonl" for suffix in suffixes}
    if len(kinds) > 1:
        raise InvalidInput(f"merge cannot turn one format into another: {', '.join(sorted(kinds))}")
    with results.replacing(target, to_path) as file:
        if kinds == {".parquet"}:
            _join_parquet(parts, file, to_path)
            return
        with results.compressed(file, results.is_gz(target)) as out:
            sources = [Source(part, to_path(part), "text", results.is_gz(part)) for part in parts]
            if kinds == {".csv"}:
                _join_csv(sources, out)
                return
            for source in sources:
                with source.open() as opened:
                    while block := opened.read(1 << 20):
                        out.write(block)


def _join_csv(sources: list[Source], out: Any) -> None:
    """Every column of any shard, in the order they are met; a shard's missing ones are empty."""
    headers = [_csv_header(source) for source in sources]
    names = list(dict.fromkeys(name for header in headers for name in header))
    out.write(_csv_line(names))
    for source, header in zip(sources, headers, strict=True):
        places = [header.index(name) if name in header else None for name in names]
        for row in _csv_body(source):
            out.write(_csv_line(["" if place is None else row[place] for place in places]))


def _join_parquet(parts: list[str], out: Any, to_path: ToPath) -> None:
    """Every column of any shard; one of several types becomes text."""
    import pyarrow
    from pyarrow import parquet

    sources = tuple(Source(part, to_path(part), "parquet", False) for part in parts)
    try:
        schema = parquet_schema(sources)
    except InvalidPrompts:
        schema = _schema_with_text(sources)
    try:
        with parquet.ParquetWriter(out, schema) as writer:
            for table in parquet_tables(pyarrow, sources, schema):
                writer.write_table(table)
    except pyarrow.ArrowException as error:
        raise InvalidInput(
            f"merge: the shards have columns of types that no one column can hold: {error}; "
            "give them .jsonl outputs and merge those"
        ) from error


def _schema_with_text(sources: tuple[Source, ...]) -> Any:
    import pyarrow

    types: dict[str, Any] = {}
    for source in sources:
        for field in parquet_schema((source,)):
            known = types.setdefault(field.name, field.type)
            types[field.name] = known if known == field.type else pyarrow.string()
    return pyarrow.schema(list(types.items()))


def _summed(
    manifests: Sequence[Mapping[str, Any]], output_path: str, errors_to: str | None
) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    for manifest in manifests:
        outcomes.update(manifest["outcomes"])
    whole = dict(manifests[0])
    for name in (
        "rows", "reused", "changed", "prompt_tokens", "completion_tokens", "retries",
        "server_losses", "server_restarts", "preemptions", "ok", "errors",
    ):  # fmt: skip
        whole[name] = sum(manifest[name] for manifest in manifests)
    seconds = max(manifest["seconds"] for manifest in manifests)
    tokens = whole["prompt_tokens"] + whole["completion_tokens"]
    sent = whole["rows"] - whole["reused"]
    whole.update(
        outcomes=dict(sorted(outcomes.items())),
        input=[path for manifest in manifests for path in manifest["input"]],
        answered_by=_answered_by(manifests),
        seconds=seconds,
        rows_per_second=round(sent / max(seconds, 1e-9), 2),
        tokens_per_second=round(tokens / max(seconds, 1e-9), 2),
        output_path=output_path,
        errors_path=errors_to,
        manifest_path=f"{output_path}.manifest.json",
        shards=len(manifests),
    )
    return whole


def _answered_by(manifests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: Counter[tuple[str, str]] = Counter()
    for manifest in manifests:
        for each in manifest["answered_by"]:
            rows[each["model"], each["fingerprint"]] += each["rows"]
    return [{"model": m, "fingerprint": f, "rows": count} for (m, f), count in rows.items()]
