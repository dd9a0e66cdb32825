"""The manifests of shards in, their outputs and error files joined into one out, in the order given.

Invariants: nothing that is merged takes the place of a shard's file, or of one that is not of the same input; a file
that has not the rows of its manifest is not merged.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.check import manifest_beside
from airflow_provider_vllm.batch.compact import IntSet
from airflow_provider_vllm.batch.csv_rows import csv_rows
from airflow_provider_vllm.batch.parquet_rows import Damage
from airflow_provider_vllm.batch.parquet_tables import (
    common_schema,
    parquet_schema,
    parquet_tables,
)
from airflow_provider_vllm.batch.pieces import CARRIED, csv_line
from airflow_provider_vllm.batch.records import custom_id_of
from airflow_provider_vllm.batch.source import UNREADABLE, Source
from airflow_provider_vllm.batch.sources import (
    ToPath,
    column_names,
    csv_header,
    local_path,
    real_path,
)
from airflow_provider_vllm.batch.spec import BatchSpec, suffix_of
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts

log = logging.getLogger(__name__)
Row = TypeVar("Row")
SHARD = re.compile(r"shard-\d{4,}(\.\d+)?\.(jsonl|txt|csv|parquet)")
TABLES = (".csv", ".parquet")
AGAIN = "clear that shard's task, which writes it again from its journal, and then this one"


@dataclass(frozen=True)
class Part:
    """One file of a shard, and how many rows it may have."""

    path: str
    rows: set[int]


def merge(
    manifests: Sequence[Mapping[str, Any]], output_path: str, *, to_path: ToPath = local_path
) -> dict[str, Any]:
    """Join the outputs and error files of shards, in the order given; their manifest as one.

    `manifests` are those of the shards' batches. Raises InvalidInput where one has no output, or the joined one
    would take the place of a shard's or of a file that is not of the same input.
    """
    # A mapped task's outputs are fetched anew each time they are gone through.
    manifests = list(manifests)
    if not manifests:
        raise InvalidInput("merge needs the manifest of at least one shard")
    outputs = [manifest.get("output_path") for manifest in manifests]
    if not all(outputs):
        raise InvalidInput(
            "merge: a shard's manifest has no output_path; its batch did not succeed"
        )
    twice = [text for text, count in Counter(map(str, outputs)).items() if count > 1]
    if twice:
        raise InvalidInput(f"merge: {', '.join(twice)} is given twice; its rows would be, too")
    errors = [Part(m["errors_path"], {m["errors"]}) for m in manifests if m.get("errors_path")]
    place = _check_merged(manifests, output_path, to_path)
    errors_to = place if errors else None
    whole = _summed(manifests, output_path, errors_to)

    def write_manifest() -> None:
        with results.replacing(whole["manifest_path"], to_path) as file:
            file.write(orjson.dumps(whole, option=orjson.OPT_INDENT_2))

    parts = list(map(_output, manifests))
    _check_there([*errors, *parts], to_path)
    if errors_to:
        with (
            results.replacing(errors_to, to_path) as file,
            results.compressed(file, results.is_gz(errors_to)) as out,
        ):
            _join_lines(errors, out, to_path)
    else:
        results.remove_stale(place, to_path)
    _join(parts, output_path, to_path, write_manifest)
    for name, what in (
        ("errors", "rows failed"),
        ("cut_off", "answers were cut off by a limit of tokens"),
    ):
        if whole[name]:
            log.warning(
                "%d of %d %s; the shards' own logs name the first", whole[name], whole["rows"], what
            )
    return whole


def _check_there(parts: list[Part], to_path: ToPath) -> None:
    for part in parts:
        if not to_path(part.path).exists():
            raise InvalidInput(f"merge: {part.path} does not exist any more; {AGAIN}")


def _output(manifest: Mapping[str, Any]) -> Part:
    """A table has all rows; JSON lines have the good ones, or all where they are columns."""
    path = str(manifest["output_path"])
    table = suffix_of(path) in TABLES
    return Part(path, {manifest["rows"]} | (set() if table else {manifest["ok"]}))


def _check_merged(manifests: Sequence[Mapping[str, Any]], output_path: str, to_path: ToPath) -> str:
    """Where the error rows go. Raises InvalidInput where something would be lost."""
    target = BatchSpec(prompts=["unused"], output_path=output_path)
    errors, manifest = str(results.errors_path(target)), str(results.manifest_path(target))
    names = ("output_path", "errors_path", "manifest_path")
    shards = {real_path(to_path(m[name])) for m in manifests for name in names if m.get(name)}
    for text in (output_path, errors, manifest):
        if real_path(to_path(text)) in shards:
            raise InvalidInput(
                f"merge: {text} is a shard's own and would be overwritten; name another output"
            )
    for text, is_ours in ((errors, results.holds_error_rows), (manifest, results.is_manifest)):
        if not is_ours(to_path(text)):
            raise InvalidInput(
                f"merge: {text} exists and no batch has written it; move it, or name another output"
            )
    found = manifest_beside(target, to_path).get("input")
    inputs = [path for manifest in manifests for path in manifest["input"]]
    if to_path(output_path).exists() and _origin(found) != _origin(inputs):
        whose = (
            f"belongs to another input ({', '.join(found)})" if found else "no batch has written it"
        )
        raise InvalidInput(
            f"merge: {output_path} exists and {whose}; move it, or name another output"
        )
    return errors


def _origin(inputs: Any) -> set[str]:
    """What an output is of: the same for any number of shards in one folder."""
    split_up = ((path, *path.rpartition("/")) for path in inputs or ())
    return {folder if SHARD.fullmatch(name) else path for path, folder, _, name in split_up}


def _join(
    parts: list[Part], target: str, to_path: ToPath, before: Callable[[], None] = lambda: None
) -> None:
    suffixes = {suffix_of(path) for path in (*(part.path for part in parts), target)}
    kinds = {suffix if suffix in TABLES else ".jsonl" for suffix in suffixes}
    if len(kinds) > 1:
        raise InvalidInput(f"merge cannot turn one format into another: {', '.join(sorted(kinds))}")
    with results.replacing(target, to_path, before) as file:
        if kinds == {".parquet"}:
            _join_parquet(parts, file, to_path)
            return
        with results.compressed(file, results.is_gz(target)) as out:
            (_join_csv if kinds == {".csv"} else _join_lines)(parts, out, to_path)


def _source(part: Part, to_path: ToPath, kind: str) -> Source:
    gz = kind != "parquet" and results.is_gz(part.path)
    return Source(part.path, to_path(part.path), kind, gz)


def _read(part: Part, rows: Iterator[Row]) -> Iterator[Row]:
    """What is read from a shard's file. Raises InvalidInput where it is broken, which is no fault of the merged one."""
    try:
        yield from rows
    except UNREADABLE as error:
        raise InvalidInput(f"merge: {part.path} cannot be read: {error}; {AGAIN}") from error


def _lines(source: Source) -> Iterator[bytes]:
    with source.open() as opened:
        yield from opened


def _join_lines(parts: list[Part], out: Any, to_path: ToPath) -> None:
    """A custom id that two rows have, which within a batch makes a bad record of the second, is told of."""
    seen = IntSet(sum(max(part.rows) for part in parts))
    doubled, first = 0, b""
    for part in parts:
        count = 0
        for line in _read(part, _lines(_source(part, to_path, "jsonl"))):
            out.write(line)
            count += 1
            custom_id = custom_id_of(line)
            if custom_id and not seen.add(hash(custom_id)):
                doubled, first = doubled + 1, first or custom_id
        _check_count(part, count)
    if doubled:
        log.warning(
            "%d rows have the custom_id of an earlier shard's row, the first %s: both are in the merged file; "
            "correct the input, or tell them apart by their order",
            doubled,
            first.decode(),
        )


def _csv_body(source: Source) -> Iterator[list[str]]:
    """The rows of an output of ours."""
    with csv_rows(source, CARRIED) as rows:
        csv_header(source, rows)
        yield from (cells for _, cells, _ in rows)


def _join_csv(parts: list[Part], out: Any, to_path: ToPath) -> None:
    """Every column of any shard, in the order they are met; a shard's missing ones are empty."""
    sources = [_source(part, to_path, "csv") for part in parts]
    headers = [column_names(source) for source in sources]
    names = list(dict.fromkeys(name for header in headers for name in header))
    out.write(csv_line(names))
    for part, source, header in zip(parts, sources, headers, strict=True):
        places = [header.index(name) if name in header else None for name in names]
        count = 0
        for row in _read(part, _csv_body(source)):
            if len(row) != len(header):
                raise InvalidInput(
                    f"merge: {part.path}, row {count + 1}: it has {len(row)} fields, the header {len(header)}: it was "
                    f"changed after its batch; {AGAIN}"
                )
            out.write(csv_line(["" if place is None else row[place] for place in places]))
            count += 1
        _check_count(part, count)


def _join_parquet(parts: list[Part], out: Any, to_path: ToPath) -> None:
    """Every column of any shard; one of several types becomes text."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    sources = tuple(_source(part, to_path, "parquet") for part in parts)

    def write(schema: Any) -> None:
        with parquet.ParquetWriter(out, schema) as writer:
            for part, source in zip(parts, sources, strict=True):
                count = 0
                tables = parquet_tables(pyarrow, (source,), schema, _refuse_damage)
                for table in _read(part, tables):
                    writer.write_table(table)
                    count += table.num_rows
                _check_count(part, count)

    try:
        schema = parquet_schema(sources)
    except InvalidPrompts:
        schema = common_schema(sources)
    try:
        try:
            write(schema)
        except pyarrow.ArrowException:  # an integer that no float holds
            out.seek(0)
            out.truncate()
            write(common_schema(sources, numbers_as_text=True))
    except pyarrow.ArrowException as error:
        raise InvalidInput(
            f"merge: the shards have columns of types that no one column can hold: {error}; "
            "give them .jsonl outputs and merge those"
        ) from error


def _refuse_damage(source: Source, damage: Damage) -> None:
    raise InvalidInput(f"merge: {source.name} cannot be read: {damage.text}; {AGAIN}")


def _check_count(part: Part, count: int) -> None:
    """Raises InvalidInput where a file was changed after its batch: rows would be missing without a word."""
    if count not in part.rows:
        expected = " or ".join(map(str, sorted(part.rows)))
        raise InvalidInput(
            f"merge: {part.path} has {count} rows, and by its manifest {expected}: it was changed after its batch; "
            f"{AGAIN}"
        )


def _summed(
    manifests: Sequence[Mapping[str, Any]], output_path: str, errors_to: str | None
) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    for manifest in manifests:
        outcomes.update(manifest["outcomes"])
    whole = dict(manifests[0])
    for name in (
        "rows", "reused", "changed", "cut_off", "prompt_tokens", "completion_tokens", "total_prompt_tokens",
        "total_completion_tokens", "retries", "server_losses", "server_restarts", "preemptions", "ok", "errors",
    ):  # fmt: skip
        whole[name] = sum(manifest.get(name, 0) for manifest in manifests)
    longest = {
        name: max(manifest[name] for manifest in manifests)
        for name in ("seconds", "sending_seconds")
    }
    seconds = max(longest["sending_seconds"], 1e-9)
    tokens = whole["prompt_tokens"] + whole["completion_tokens"]
    sent = whole["rows"] - whole["reused"]
    whole.update(
        outcomes=dict(sorted(outcomes.items())),
        input=[path for manifest in manifests for path in manifest["input"]],
        answered_by=_answered_by(manifests),
        **longest,
        rows_per_second=round(sent / seconds, 2),
        tokens_per_second=round(tokens / seconds, 2),
        advice=_advice(manifests),
        output_path=output_path,
        errors_path=errors_to,
        manifest_path=f"{output_path}.manifest.json",
        shards=len(manifests),
    )
    return whole


def _advice(manifests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for manifest in manifests:
        found += [each for each in manifest["advice"] if each not in found]
    return found


def _answered_by(manifests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: Counter[tuple[str, str]] = Counter()
    for manifest in manifests:
        for each in manifest["answered_by"]:
            rows[each["model"], each["fingerprint"]] += each["rows"]
    return [{"model": m, "fingerprint": f, "rows": count} for (m, f), count in rows.items()]
