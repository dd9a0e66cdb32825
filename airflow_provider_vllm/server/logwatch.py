"""Following vllm.log: new bytes go in, what they say of the start and of the engine comes out.

Each call reads one block at most and keeps no line but the last unfinished one; of a line only its beginning
is searched. So neither a log of any length nor a line of any length holds up the supervisor.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from airflow_provider_vllm.diagnosis.colour import plain
from airflow_provider_vllm.diagnosis.stages import is_fatal, stage_of

BLOCK = 256 * 1024
# What we look for stands at the beginning of a line; a logged prompt may follow.
LONGEST_LINE = 4096

# "Address already in use" with its number, as asyncio and the socket module write it; not vLLM's
# harmless "Retrying with a new port" of its inner rendezvous.
_PORT_TAKEN = re.compile(r"\[Errno 98\]")
_PROGRESS = re.compile(r"\b(\d{1,3}%)\|[^|]*\| *([\d.]+[kMG]?/[\d.]+[kMG]?)")


@dataclass(frozen=True)
class News:
    """What the new lines said: the last stage, the last progress, and the first fatal line. `more`: there is
    more to read already."""

    stage: str | None = None
    progress: str | None = None
    fatal: str | None = None
    port_taken: bool = False
    more: bool = False


class LogWatch:
    """Follows one file from `offset` on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""

    def read(self) -> News:
        """What the next block says; empty where nothing was written since the last call."""
        block = self._block()
        stage = progress = fatal = None
        taken = False
        # A progress bar comes back to the beginning of its line with a carriage return.
        lines = (self._rest + block).replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()[:LONGEST_LINE]
        for raw in lines:
            line = plain(raw[:LONGEST_LINE].decode(errors="replace"))
            stage = stage_of(line) or stage
            if found := _PROGRESS.search(line):
                progress = f"{found[1]} ({found[2]})"
            if fatal is None and is_fatal(line):
                fatal = line.strip()
            taken = taken or bool(_PORT_TAKEN.search(line))
        return News(stage, progress, fatal, taken, more=len(block) == BLOCK)

    def _block(self) -> bytes:
        try:
            with open(self._path, "rb") as log:
                if self._offset > os.fstat(log.fileno()).st_size:
                    self._offset = 0  # somebody emptied it
                log.seek(self._offset)
                data = log.read(BLOCK)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data
