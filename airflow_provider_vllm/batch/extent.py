"""The files of a batch in, how many rows they have and what they are known by out.

Invariant: the same input gives the same digest in every try.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import orjson

from airflow_provider_vllm.batch.parquet_rows import Damage, parquet_file, parquet_parts
from airflow_provider_vllm.batch.source import UNREADABLE, Damaged, Source
from airflow_provider_vllm.batch.sources import BLOCK, BOM, READERS, is_local
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.version import version_of
from airflow_provider_vllm.exceptions import InvalidPrompts


@dataclass(frozen=True)
class Extent:
    """How many rows there are (None: not known without reading a remote file) and a digest of the input."""

    rows: int | None
    digest: str


def measure(spec: BatchSpec, sources: tuple[Source, ...]) -> Extent:
    """Count and digest the input: local files and lists by content, remote ones by name and `version_of`.

    Raises InvalidPrompts where a file holds no row at all.
    """
    hasher = hashlib.blake2b(digest_size=16)
    if spec.prompts is not None:
        for prompt in spec.prompts:
            hasher.update(_mark(prompt) + b"\n")
        return Extent(len(spec.prompts), hasher.hexdigest())
    total: int | None = 0
    for source in sources:
        try:
            rows = _rows(source, spec, hasher)
        except UNREADABLE as error:
            what = str(error) if isinstance(error, Damaged) else f"{source.name}: {error}"
            hint = "; unpack what there is of it with zcat" if source.gz else ""
            raise InvalidPrompts(
                f"input_path {what}; it cannot be read to its end{hint}"
            ) from error
        if rows == 0:
            raise InvalidPrompts(f"input_path {source.name} holds no rows: there is nothing to do")
        total = None if rows is None or total is None else total + rows
    return Extent(total, hasher.hexdigest())


MARK = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def _mark(prompt: Any) -> bytes:
    """A prompt of a list as bytes that are the same in every try; of what is no JSON the type is all there is."""
    try:
        return orjson.dumps(prompt, default=_type, option=MARK)
    except TypeError:  # orjson's JSONEncodeError is one
        try:
            text = json.dumps(prompt, default=_type, skipkeys=True)
        except (TypeError, ValueError, RecursionError):
            text = _type(prompt)
        return text.encode()


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _rows(source: Source, spec: BatchSpec, hasher: Any) -> int | None:
    if not is_local(source.path):
        hasher.update(f"{source.name} {version_of(source.path)}\n".encode())
        if source.format != "parquet":
            return None if _has_rows(source, spec) else 0
    elif source.format in ("jsonl", "text"):
        return _count_lines(source, hasher)
    else:
        with source.path.open("rb") as file:
            while block := file.read(BLOCK):
                hasher.update(block)
    if source.format == "parquet":
        return _count_parquet(source)
    return sum(1 for _ in READERS["csv"](source, spec))


def _has_rows(source: Source, spec: BatchSpec) -> bool:
    """Whether there is a row at all; of most files the start says so, and they are not opened again."""
    start = source.start.removeprefix(BOM).strip(b"\r\n \t")
    if b"\n" in start or (start and source.format != "csv"):
        return True
    return next(READERS[source.format](source, spec), None) is not None


def _count_parquet(source: Source) -> int:
    """The rows, damaged ones among them. Raises InvalidPrompts where no row group can be read."""
    damage = None
    for part in parquet_parts(source, 1):
        if not isinstance(part, Damage):
            break
        damage = damage or part
    else:
        if damage is not None:
            raise InvalidPrompts(f"input_path {source.name}: {damage.text}")
    with source.open() as raw, parquet_file(source, raw) as table:
        return int(table.metadata.num_rows)


def _count_lines(source: Source, hasher: Any) -> int:
    """Lines up to the last one that is not blank."""
    ends = rows = 0
    with source.open() as file:
        while block := file.read(BLOCK):
            hasher.update(block)
            used = block.rstrip(b"\r\n \t")
            if used.removeprefix(BOM):
                rows = ends + used.count(b"\n") + 1
            ends += block.count(b"\n")
    return rows
