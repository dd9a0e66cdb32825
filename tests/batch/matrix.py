"""The batch that the kill matrix disturbs, and what must come of it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import batch_row, write_rows

ROWS = 600


def rows(count: int = ROWS) -> list[Any]:
    """Mostly good rows, a refused one and a broken one among them."""
    made: list[Any] = [batch_row(f"id-{index}", f"prompt {index}") for index in range(count)]
    made[7] = batch_row("id-7", "[[status 400]] no")
    made[count // 2] = b"{broken\n"
    return made


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    source = folder / "in.jsonl"
    if not source.exists():
        write_rows(source, rows())
    given = {"concurrency": 16, "pack": 1, "progress_interval": 0.5, "journal_sync": 0.2, **more}
    return {"input_path": str(source), "output_path": str(folder / "out.jsonl"), **given}


def spec_of(folder: Path, **more: Any) -> BatchSpec:
    return BatchSpec(**arguments(folder, **more))


def outputs(folder: Path) -> dict[str, bytes]:
    """Results and errors; the errors without the folder that they name."""
    errors = (
        (folder / "out.jsonl.errors.jsonl").read_bytes().replace(str(folder).encode(), b"FOLDER")
    )
    return {"results": (folder / "out.jsonl").read_bytes(), "errors": errors}


def check(folder: Path, quiet: dict[str, bytes]) -> None:
    manifest = json.loads((folder / "out.jsonl.manifest.json").read_text())
    assert manifest["outcomes"] == {"invalid_input": 1, "ok": ROWS - 2, "rejected": 1}
    assert manifest["rows"] == sum(manifest["outcomes"].values()) == ROWS
    assert outputs(folder) == quiet
    assert not list(folder.glob("*.part")) + list(folder.glob(".*.part"))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@contextmanager
def killed_at(process: subprocess.Popen[str], sign: int = signal.SIGKILL) -> Iterator[None]:
    """The block waits for the moment; the process gets the signal at its end."""
    try:
        yield
    finally:
        process.send_signal(sign)


def ids(quiet: dict[str, bytes]) -> list[str]:
    return [json.loads(line)["custom_id"] for line in quiet["results"].splitlines()]


def journalled(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (folder / "journal").glob("rows-*.log"))
