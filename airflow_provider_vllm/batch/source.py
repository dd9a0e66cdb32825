"""One input file, and what can be wrong with it or with a record of it."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass, field
from typing import Any

UNREADABLE = (OSError, EOFError, zlib.error)  # what reading a file raises, a gzipped one included


class RecordError(Exception):
    """A record that cannot be read; `code` is short and fixed, the message says what is wrong.

    `columns` holds what could be read of it, for an output with columns; `field` is the column that is wrong.
    """

    def __init__(
        self,
        code: str,
        message: str,
        columns: dict[str, Any] | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.field = code, field
        self.columns = columns or {}


class Damaged(OSError):
    """A file that cannot be read on; the message names it."""


@dataclass(frozen=True)
class Source:
    """One readable file; `start` are its first bytes, unpacked."""

    name: str
    path: Any
    format: str
    gz: bool
    start: bytes = field(default=b"", repr=False, compare=False)

    def open(self) -> Any:
        """The decompressed bytes."""
        raw = self.path.open("rb")
        return gzip.GzipFile(fileobj=raw, mode="rb") if self.gz else raw
