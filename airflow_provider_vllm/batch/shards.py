"""One input in, shards of it out, and the results of the shards back into one: for mapped tasks.

    shards = task(split)("prompts.jsonl", "work/", shards=4)   # [{"input_path": ..., "row_offset": ...}, ...]
    parts = VllmBatchOperator.partial(..., output_path="work/{{ ti.map_index }}.jsonl").expand_kwargs(shards)
    task(merge)(parts.output, "answers.jsonl")

Invariants: shards are consecutive parts, so that merging in their order keeps the input's; `row_offset`
keeps the ids that rows without a `custom_id` get as they would be without shards; neither shards nor what is
merged take the place of their own input, or of a file that is not their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import orjson

from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.check import manifest_beside
from airflow_provider_vllm.batch.csv_rows import csv_rows
from airflow_provider_vllm.batch.parquet_tables import parquet_schema, parquet_tables
from airflow_provider_vllm.batch.pieces import BORDER, CARRIED, Blocks, csv_line, pieces
from airflow_provider_vllm.batch.source import Source
from airflow_provider_vllm.batch.sources import (
    ToPath,
    column_names,
    csv_header,
    find_sources,
    local_path,
    real_path,
    records,
)
from airflow_provider_vllm.batch.spec import BatchSpec, suffix_of
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts

SUFFIX = {"jsonl": ".jsonl", "text": ".txt", "csv": ".csv", "parquet": ".parquet"}
CLAIM = "shards.json"  # in the shards' folder: the input that they are of
SHARD = re.compile(r"shard-\d{4,}(\.\d+)?\.(jsonl|txt|csv|parquet)")


def split(
    input_path: str | Sequence[str],
    output_dir: str,
    *,
    shards: int,
    input_format: str | None = None,
    to_path: ToPath = local_path,
) -> list[dict[str, Any]]:
    """Write the input as up to `shards` shards of nearly equal row counts into `output_dir`.

    Returns arguments for one batch each: `input_path` (a list where what one CSV file leaves open would run into the
    next), `row_offset`. Raises InvalidPrompts for an input that cannot be read, files of different formats, or an
    `input_path` that takes in the shards themselves, and InvalidInput for a folder that has shards of another input.
    """
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise InvalidInput(f"shards is {shards!r}; use a number from 1")
    spec = BatchSpec(input_path=input_path, output_path="unused", input_format=input_format)
    sources = find_sources(spec, to_path)
    folder = to_path(output_dir)
    _check_apart(sources, folder)
    formats = {source.format for source in sources}
    if len(formats) > 1:
        raise InvalidPrompts(
            f"input_path holds files of several formats: {', '.join(sorted(formats))}"
        )
    rows = sum(1 for _ in records(spec, sources))
    if not rows:
        raise InvalidPrompts(f"input_path {', '.join(spec.paths)} holds no rows: nothing to split")
    folder.mkdir(parents=True, exist_ok=True)
    claim = _claim(folder, spec.paths, str(output_dir), to_path)
    kind = formats.pop()
    made: list[dict[str, Any]] = []
    for index, (first, data) in enumerate(pieces(kind, sources, max(1, -(-rows // shards)))):
        stem = f"{str(output_dir).rstrip('/')}/shard-{index:04d}"
        names = _write(stem, SUFFIX[kind], data, to_path)
        if index == 0:
            _check_apart_now(spec, [*claim, *names], folder, to_path)
        made.append({"input_path": names if len(names) > 1 else names[0], "row_offset": first})
    return made


def _claim(folder: Any, paths: Sequence[str], output_dir: str, to_path: ToPath) -> list[str]:
    """Note whose shards the folder has, before one is written; the name of the note where it is new.

    Raises InvalidInput where shards would be overwritten that a batch of another input may still be reading.
    """
    name = f"{output_dir.rstrip('/')}/{CLAIM}"
    remedy = (
        "give the shards a folder of their own, one for each run where the input's path changes"
    )
    try:
        noted = orjson.loads(to_path(name).read_bytes())["input"]
    except FileNotFoundError:
        if (found := _any_shard(folder)) is not None:
            raise InvalidInput(
                f"split: {found} exists and no split has written it; {remedy}"
            ) from None
        with results.replacing(name, to_path) as file:
            file.write(orjson.dumps({"input": list(paths)}))
        return [name]
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInput(f"split: {name} exists and no split has written it; {remedy}") from error
    if noted != list(paths):
        raise InvalidInput(
            f"split: {output_dir} has the shards of another input ({', '.join(map(str, noted))}); {remedy}"
        )
    return []


def _any_shard(folder: Any) -> Any:
    """The path of one, or None; on object storage an empty folder does not exist."""
    with suppress(FileNotFoundError):
        return next((path for path in folder.iterdir() if SHARD.fullmatch(path.name)), None)
    return None


def _write(stem: str, suffix: str, data: Blocks, to_path: ToPath) -> list[str]:
    """The names of the files of one shard."""
    names: list[str] = []
    for is_border, blocks in groupby(data, lambda block: block is BORDER):
        if not is_border:
            names.append(f"{stem}.{len(names)}{suffix}" if names else f"{stem}{suffix}")
            with results.replacing(names[-1], to_path) as file:
                file.writelines(blocks)
    return names


def _check_apart(sources: tuple[Source, ...], folder: Any) -> None:
    """No shard may be an input, which it would overwrite, or double in the next run."""
    for source in sources:
        path = results.target_of(source.path)
        if SHARD.fullmatch(path.name) and real_path(path.parent) == real_path(folder):
            raise InvalidPrompts(
                f"input_path takes in {source.name}, which has the name of a shard in output_dir {folder}: it would "
                "be overwritten, or its rows sent twice; give the shards a folder that input_path does not cover"
            )


def _check_apart_now(spec: BatchSpec, names: list[str], folder: Any, to_path: ToPath) -> None:
    """The same, once there is a shard for a glob to find."""
    try:
        _check_apart(find_sources(spec, to_path), folder)
    except InvalidPrompts:
        for name in names:
            to_path(name).unlink()
        raise


def _csv_body(source: Source) -> Iterator[list[str]]:
    """The rows of an output of ours."""
    with csv_rows(source, CARRIED) as rows:
        csv_header(source, rows)
        yield from (cells for _, cells, _ in rows)


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
    errors = [m["errors_path"] for m in manifests if m.get("errors_path")]
    place = _check_merged(manifests, output_path, to_path)
    errors_to = place if errors else None
    whole = _summed(manifests, output_path, errors_to)

    def write_manifest() -> None:
        with results.replacing(whole["manifest_path"], to_path) as file:
            file.write(orjson.dumps(whole, option=orjson.OPT_INDENT_2))

    if errors_to:
        _join(errors, errors_to, to_path)
    else:
        results.remove_stale(place, to_path)
    _join([str(output) for output in outputs], output_path, to_path, write_manifest)
    return whole


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
    parts: list[str], target: str, to_path: ToPath, before: Callable[[], None] = lambda: None
) -> None:
    suffixes = {suffix_of(part) for part in (*parts, target)}
    kinds = {suffix if suffix in (".csv", ".parquet") else ".jsonl" for suffix in suffixes}
    if len(kinds) > 1:
        raise InvalidInput(f"merge cannot turn one format into another: {', '.join(sorted(kinds))}")
    with results.replacing(target, to_path, before) as file:
        if kinds == {".parquet"}:
            _join_parquet(parts, file, to_path)
            return
        with results.compressed(file, results.is_gz(target)) as out:
            sources = [Source(part, to_path(part), "csv", results.is_gz(part)) for part in parts]
            if kinds == {".csv"}:
                _join_csv(sources, out)
                return
            for source in sources:
                with source.open() as opened:
                    while block := opened.read(1 << 20):
                        out.write(block)


def _join_csv(sources: list[Source], out: Any) -> None:
    """Every column of any shard, in the order they are met; a shard's missing ones are empty."""
    headers = [column_names(source) for source in sources]
    names = list(dict.fromkeys(name for header in headers for name in header))
    out.write(csv_line(names))
    for source, header in zip(sources, headers, strict=True):
        places = [header.index(name) if name in header else None for name in names]
        for row in _csv_body(source):
            out.write(csv_line(["" if place is None else row[place] for place in places]))


def _join_parquet(parts: list[str], out: Any, to_path: ToPath) -> None:
    """Every column of any shard; one of several types becomes text."""
    import pyarrow  # type: ignore[import-untyped]
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
        "rows", "reused", "changed", "prompt_tokens", "completion_tokens", "total_prompt_tokens",
        "total_completion_tokens", "retries", "server_losses", "server_restarts", "preemptions", "ok", "errors",
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
