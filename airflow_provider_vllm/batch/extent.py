"""The files of a batch in, how many rows they have and what they are known by out.

Invariant: the same input gives the same digest in every try.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from airflow_provider_vllm.batch.parquet_rows import Damage, parquet_file, parquet_parts
from airflow_provider_vllm.batch.source import UNREADABLE, Damaged, Source
from airflow_provider_vllm.batch.sources import BLOCK, BOM, READERS, is_local, some
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.version import version_of
from airflow_provider_vllm.exceptions import InvalidPrompts

log = logging.getLogger(__name__)
Item = TypeVar("Item")
TELL_EVERY = 10.0  # seconds


@dataclass(frozen=True)
class Extent:
    """How many rows there are, and a digest of the input."""

    rows: int
    digest: str


def measure(spec: BatchSpec, sources: tuple[Source, ...]) -> Extent:
    """Count the rows, and digest the input as `digest` does. Each file is read to its end, Parquet but for its rows.

    Raises InvalidPrompts where there is no row at all, or a file cannot be read to its end.
    """
    if spec.prompts is not None:
        return Extent(len(spec.prompts), digest(spec, sources))
    hasher = _hasher()
    total, empty = 0, []
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
            empty.append(source.name)
        total += rows
    if not total:
        raise InvalidPrompts(f"input_path {empty[0]} holds no rows: there is nothing to do")
    if empty:
        log.warning("input_path has files without a row: %s", some(empty))
    return Extent(total, hasher.hexdigest())


def digest(spec: BatchSpec, sources: tuple[Source, ...]) -> str:
    """Lists and local files by content, remote files by name and `version_of`, unread. Raises what reading raises."""
    hasher = _hasher()
    for prompt in spec.prompts or ():
        hasher.update(_mark(prompt) + b"\n")
    for source in sources:
        _digest(source, hasher)
    return str(hasher.hexdigest())


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=16)


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


def _rows(source: Source, spec: BatchSpec, hasher: Any) -> int:
    if source.format in ("jsonl", "text"):
        if is_local(source.path):
            return _count_lines(source, hasher)
        _digest(source, hasher)
        return _count_lines(source)
    _digest(source, hasher)
    if source.format == "parquet":
        return _count_parquet(source)
    rows = READERS["csv"](source, spec)
    return sum(1 for _ in telling(rows, lambda row: 1, source.name, "rows"))


def _digest(source: Source, hasher: Any) -> None:
    if not is_local(source.path):
        hasher.update(f"{source.name} {version_of(source.path)}\n".encode())
        return
    as_it_is = source.format in ("csv", "parquet")
    with source.path.open("rb") if as_it_is else source.open() as file:
        while block := file.read(BLOCK):
            hasher.update(block)


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


def _count_lines(source: Source, hasher: Any = None) -> int:
    """Lines up to the last one that is not blank."""
    ends = rows = 0
    with source.open() as file:
        for block in telling(iter(lambda: file.read(BLOCK), b""), len, source.name, "bytes"):
            if hasher is not None:
                hasher.update(block)
            used = block.rstrip(b"\r\n \t")
            if used.removeprefix(BOM):
                rows = ends + used.count(b"\n") + 1
            ends += block.count(b"\n")
    return rows


def telling(
    items: Iterator[Item], size: Callable[[Item], int], name: str, unit: str
) -> Iterator[Item]:
    """The same items; how much of them has passed is in the log every ten seconds."""
    told, passed = time.monotonic(), 0
    for item in items:
        passed += size(item)
        yield item
        if (now := time.monotonic()) >= told + TELL_EVERY:
            told = now
            log.info("Counting the rows of %s: %s %s so far", name, f"{passed:,}", unit)
