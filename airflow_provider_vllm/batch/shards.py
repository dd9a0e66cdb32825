"""One input in, shards of it out, for mapped tasks; `merge` joins what their batches wrote.

    shards = task(split)("prompts.jsonl", "work/", shards=4)   # [{"input_path": ..., "row_offset": ...}, ...]
    parts = VllmBatchOperator.partial(..., output_path="work/{{ ti.map_index }}.jsonl").expand_kwargs(shards)
    task(merge)(parts.output, "answers.jsonl")

Invariants: shards are consecutive parts, so that merging in their order keeps the input's; `row_offset`
keeps the ids that rows without a `custom_id` get as they would be without shards; no shard takes the place of its own
input, or of a file that no split of the same input has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import orjson

from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.merging import SHARD, merge
from airflow_provider_vllm.batch.pieces import BORDER, Blocks, pieces
from airflow_provider_vllm.batch.source import Source
from airflow_provider_vllm.batch.sources import ToPath, find_sources, local_path, real_path, records
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts

__all__ = ["merge", "split"]

SUFFIX = {"jsonl": ".jsonl", "text": ".txt", "csv": ".csv", "parquet": ".parquet"}
CLAIM = "shards.json"  # in the shards' folder: the input that they are of


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
