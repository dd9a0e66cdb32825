"""Private files in one step: text goes in, a file of mode 0600 comes out, whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600; a reader sees the old or the new one. Raises OSError."""
    with _temporary(path, text) as temporary:
        os.replace(temporary, path)


def create_private(path: Path, text: str) -> bool:
    """The same where there is no such file yet; whether it was this call that made it."""
    with _temporary(path, text) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


def json_text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, default=list) + "\n"


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_private(path, json_text(data))


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or None when there is none."""
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


@contextmanager
def _temporary(path: Path, text: str) -> Iterator[Path]:
    """A file beside `path` with this text, gone afterwards unless it was renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w") as out:
            out.write(text)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
