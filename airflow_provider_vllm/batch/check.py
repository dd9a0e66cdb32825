"""A spec in, its files looked at, out: everything that can be found wrong before a server is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import orjson

from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.columns import check_columns
from airflow_provider_vllm.batch.remote import journal_at
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.schema import checker
from airflow_provider_vllm.batch.sources import (
    Extent,
    Source,
    ToPath,
    find_sources,
    is_local,
    local_path,
    measure,
)
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidPrompts


@dataclass(frozen=True)
class Checked:
    """A spec whose input is there and whose output may be written."""

    sources: tuple[Source, ...]
    extent: Extent


def check_inputs(
    spec: BatchSpec, *, to_path: ToPath = local_path, journal_dir: str | None = None
) -> Checked:
    """Read the input once and look at the output's place. Raises InvalidPrompts, naming what is wrong.

    `to_path` turns text into a path-like (`pathlib.Path`, `ObjectStoragePath`). `journal_dir` lets a retry recognise
    the output of its own earlier try.
    """
    sources = find_sources(spec, to_path)
    RowMaker(spec, "")  # raises for a template that cannot be used
    checker(spec.output_schema)
    _check_output(spec, sources, to_path)
    extent = measure(spec, sources)
    check_columns(spec, sources)
    _check_owner(spec, extent, to_path, journal_dir)
    return Checked(sources, extent)


def _check_output(spec: BatchSpec, sources: tuple[Source, ...], to_path: ToPath) -> None:
    for name, text in (
        ("output_path", spec.output_path),
        ("errors_path", results.errors_path(spec)),
    ):
        if text is None:
            continue
        path = to_path(text)
        if any(_same(path, source.path) for source in sources):
            raise InvalidPrompts(
                f"{name} is the input {text}: it would be overwritten; name another file"
            )
        if not is_local(path):
            continue
        if path.is_dir():
            raise InvalidPrompts(f"{name} {text} is a directory; name a file in it")
        if not path.parent.is_dir():
            raise InvalidPrompts(
                f"{name} {text}: the directory {path.parent} does not exist; create it first"
            )
        if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
            raise InvalidPrompts(f"{name} {text}: no permission to write in {path.parent}")


def _same(one: Any, other: Any) -> bool:
    if is_local(one) and is_local(other):
        try:
            return bool(one.samefile(other))
        except OSError:
            return False
    return str(one) == str(other)


def _check_owner(spec: BatchSpec, extent: Extent, to_path: ToPath, journal_dir: str | None) -> None:
    """An output that exists must be of this input, or of an earlier try of this batch."""
    if spec.output_path is None or not to_path(spec.output_path).exists():
        return
    if journal_dir is not None:
        meta = journal_at(journal_dir, to_path).read_meta()
        if meta is not None and meta.output_path == spec.output_path:
            return
    try:
        found = orjson.loads(to_path(str(results.manifest_path(spec))).read_bytes())
        owner, digest = tuple(found["input"]), found["input_digest"]
    except (OSError, ValueError, KeyError, TypeError):
        owner, digest = None, None
    if owner is None:
        raise InvalidPrompts(
            f"output_path {spec.output_path} exists and has no manifest that says "
            "whose it is; delete it or name another"
        )
    if owner != spec.paths or (not spec.paths and digest != extent.digest):
        of = ", ".join(owner) or "another list of prompts"
        raise InvalidPrompts(
            f"output_path {spec.output_path} exists and belongs to another input ({of}); name another file, for "
            "example with {{ ds_nodash }} in it, or delete it"
        )
