"""A spec in, its files looked at, out: everything that can be found wrong before a server is started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.columns import check_columns
from airflow_provider_vllm.batch.extent import Extent, measure
from airflow_provider_vllm.batch.journal import Journal, Meta
from airflow_provider_vllm.batch.needs import lacks
from airflow_provider_vllm.batch.remote import journal_at
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.schema import checker
from airflow_provider_vllm.batch.source import Damaged, Source
from airflow_provider_vllm.batch.sources import (
    ToPath,
    column_names,
    find_sources,
    is_local,
    local_path,
)
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidPrompts

LONGEST_NAME = 255 - len(".12345678..part")  # a file is written under such a name first
PACKAGES = {
    "s3": "apache-airflow-providers-amazon and s3fs",
    "gs": "apache-airflow-providers-google and gcsfs",
    "gcs": "apache-airflow-providers-google and gcsfs",
    "abfs": "apache-airflow-providers-microsoft-azure and adlfs",
    "abfss": "apache-airflow-providers-microsoft-azure and adlfs",
}


@dataclass(frozen=True)
class Checked:
    """A spec whose input is there and whose output may be written."""

    sources: tuple[Source, ...]
    extent: Extent
    owner: str = ""
    run: str = ""


def check_inputs(
    spec: BatchSpec,
    *,
    to_path: ToPath = local_path,
    journal_dir: str | None = None,
    owner: str = "",
) -> Checked:
    """Read the input once and look at the output's place. Raises InvalidPrompts, naming what is wrong.

    `to_path` turns text into a path-like (`pathlib.Path`, `ObjectStoragePath`). `journal_dir` lets a retry recognise
    the output of its own earlier try; `owner` names what stays the same over tries (a task of a run).
    """
    outputs = (spec.output_path, results.errors_path(spec), results.manifest_path(spec))
    own = [text for text in (*outputs, journal_dir) if text is not None]
    for text in (*spec.paths, *own):
        _check_url(text, to_path)
    sources = find_sources(spec, to_path, own)
    RowMaker(spec, "")  # raises for a template that cannot be used
    checker(spec.output_schema)
    _check_output(spec, sources, to_path)
    try:
        _check_header(spec, sources)
        extent = measure(spec, sources)
        check_columns(spec, sources)
    except Damaged as error:
        raise InvalidPrompts(f"input_path {error}; it cannot be read to its end") from error
    checked = Checked(sources, extent, owner)
    _check_owner(
        spec, checked, to_path, None if journal_dir is None else journal_at(journal_dir, to_path)
    )
    return checked


def _check_url(text: str, to_path: ToPath) -> None:
    """There must be a file system for every URL."""
    try:
        path = to_path(text)
        if not is_local(path):
            getattr(path, "fs", None)  # made when it is asked for first
    except InvalidPrompts:
        raise
    except (ImportError, ValueError) as error:
        scheme = text.partition("://")[0]
        packages = PACKAGES.get(scheme, f"the fsspec package for {scheme}")
        raise InvalidPrompts(
            f"{text}: there is no file system for {scheme}:// here: {error}; install {packages}"
        ) from error


def _check_header(spec: BatchSpec, sources: tuple[Source, ...]) -> None:
    """A table whose columns make no row is known before any server is started."""
    tables = [source for source in sources if source.format in ("csv", "parquet")]
    every: dict[str, None] = {}
    for source in tables:
        names = column_names(source)
        every.update(dict.fromkeys(names))
        if (what := lacks(spec, names)) is None:
            continue
        other = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
        hint = f"; it seems to be separated by {other!r}: use commas" if other else ""
        raise InvalidPrompts(
            f"input_path {source.name}: {what}; its columns are {_listed(names)}{hint}"
        )
    missing = [name for name in spec.param_columns if name not in every]
    if missing and sources and len(tables) == len(sources):
        raise InvalidPrompts(
            f"param_columns: the input has no column {_listed(missing)}; its columns are {_listed(every)}"
        )


def _listed(names: Iterable[str]) -> str:
    """At most twenty names."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")


def _check_output(spec: BatchSpec, sources: tuple[Source, ...], to_path: ToPath) -> None:
    seen: list[tuple[str, Any]] = []
    for name, text, is_ours in (
        ("output_path", spec.output_path, None),
        ("errors_path", results.errors_path(spec), results.holds_error_rows),
        ("the manifest of output_path", results.manifest_path(spec), results.is_manifest),
    ):
        if text is None:
            continue
        path = to_path(text)
        if any(_same(path, source.path) for source in sources):
            raise InvalidPrompts(
                f"{name} is the input {text}: it would be overwritten; name another file"
            )
        for other, known in seen:
            if str(path) == str(known) or _same(path, known):
                raise InvalidPrompts(f"{name} and {other} are one file, {text}; name another file")
        seen.append((name, path))
        if is_local(path):
            _check_place(name, text, path)
        if is_ours is not None and not is_ours(path):
            raise InvalidPrompts(
                f"{name}: {path} exists and no batch has written it; it would be lost; move it, "
                "or name another file"
            )


def _check_place(name: str, text: str, path: Path) -> None:
    """Whether a local file can be written there."""
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise InvalidPrompts(f"{name} {text}: the file name is too long; use a shorter one")
    if path.is_dir():
        raise InvalidPrompts(f"{name} {text} is a directory; name a file in it")
    folder = results.target_of(path).parent
    if not folder.is_dir():
        raise InvalidPrompts(
            f"{name} {text}: the directory {folder} does not exist; create it first"
        )
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise InvalidPrompts(f"{name} {text}: no permission to write in {folder}")


def _has_rows(text: str, to_path: ToPath) -> bool:
    path = to_path(text)
    return bool(path.exists() and path.stat().st_size)


def _same(one: Any, other: Any) -> bool:
    if is_local(one) and is_local(other):
        try:
            return bool(one.samefile(other))
        except OSError:
            return False
    return str(one) == str(other)


def meta_of(spec: BatchSpec, checked: Checked, fingerprint: str = "") -> Meta:
    """What the journal of this batch says of it."""
    return Meta(
        fingerprint,
        checked.extent.digest,
        spec.output_path,
        spec.paths,
        checked.owner,
        checked.run,
        spec.errors_path,
    )


def check_journal(
    spec: BatchSpec, checked: Checked, journal: Journal, fingerprint: str = ""
) -> Meta | None:
    """What the journal was written for. Raises InvalidPrompts where that is another batch's output.

    Called before anything is started, and again under the journal's lock, since another may have begun in between.
    """
    meta = journal.read_meta()
    if meta is None or spec.output_path is None:
        return meta
    now = meta_of(spec, checked, fingerprint)
    if meta.is_rival_of(now):
        raise InvalidPrompts(
            f"output_path {spec.output_path} is also that of {meta.owner} in this run, which asks another model "
            f"or with other parameters, as {journal.name}/meta.json says: each would overwrite the other's answers; "
            "give each its own, for example with {{ ti.map_index }} or the model's name in it"
        )
    if not meta.may_be_taken_by(now):
        of = ", ".join(meta.inputs) or "another list of prompts"
        by = f" of {meta.owner}" if meta.owner else ""
        raise InvalidPrompts(
            f"output_path {spec.output_path} belongs to another input ({of}{by}), as {journal.name}/meta.json says; "
            "name another file, for example with {{ ds_nodash }} or the map index in it, or delete the "
            "output and that folder"
        )
    return meta


def _check_owner(
    spec: BatchSpec, checked: Checked, to_path: ToPath, journal: Journal | None
) -> None:
    """Outputs or a journal that exist must be of this input, or of an earlier try of this batch."""
    meta = None if journal is None else check_journal(spec, checked, journal)
    if spec.output_path is None:
        return
    found, errors_at = manifest_beside(spec, to_path), spec.errors_path
    own_errors = {found.get("errors_path")}
    if meta is not None and meta.output_path == spec.output_path:
        own_errors.add(meta.errors_path)
    elif to_path(spec.output_path).exists():
        _check_manifest(spec, checked, found)
    if errors_at and errors_at not in own_errors and _has_rows(errors_at, to_path):
        raise InvalidPrompts(
            f"errors_path {errors_at} holds the error rows of another batch, which would be lost; leave it out "
            "(they go beside the output), name another file, or delete it"
        )


def _check_manifest(spec: BatchSpec, checked: Checked, found: dict[str, Any]) -> None:
    """Whether the output beside a manifest is of this input."""
    owner = found.get("input")
    if not isinstance(owner, list) or not all(isinstance(path, str) for path in owner):
        raise InvalidPrompts(
            f"output_path {spec.output_path} exists and has no manifest that says "
            "whose it is; delete it or name another"
        )
    digest = found.get("input_digest")
    if tuple(owner) != spec.paths or (not spec.paths and digest != checked.extent.digest):
        of = ", ".join(owner) or "another list of prompts"
        raise InvalidPrompts(
            f"output_path {spec.output_path} exists and belongs to another input ({of}); name another file, for "
            "example with {{ ds_nodash }} in it, or delete it"
        )


def manifest_beside(spec: BatchSpec, to_path: ToPath) -> dict[str, Any]:
    """What is beside the output; empty where there is none."""
    try:
        found = orjson.loads(to_path(str(results.manifest_path(spec))).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
