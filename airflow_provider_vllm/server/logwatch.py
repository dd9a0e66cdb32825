"""Following vllm.log: new bytes go in, what they say of the start and of the engine comes out.

Reads at most one block at a time and keeps no line but the last unfinished one, so a log of any length
costs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from airflow_provider_vllm.diagnosis.stages import is_fatal, stage_of

BLOCK = 1024 * 1024
LONGEST_LINE = 64 * 1024

# "Address already in use" with its number, as asyncio and the socket module write it; not vLLM's
# harmless "Retrying with a new port" of its inner rendezvous.
_PORT_TAKEN = re.compile(r"\[Errno 98\]")
_PROGRESS = re.compile(r"(\d+%)\|[^|]*\| *([\d.]+[kMG]?/[\d.]+[kMG]?)")


@dataclass(frozen=True)
class News:
    """What the new lines said: the last stage, the last progress, and the first fatal line."""

    stage: str | None = None
    progress: str | None = None
    fatal: str | None = None
    port_taken: bool = False
    grew: bool = False


class LogWatch:
    """Follows one file from its current end or beginning."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""

    def read(self) -> News:
        """What was written since the last call."""
        stage = progress = fatal = None
        taken = grew = False
        while block := self._block():
            grew = True
            lines = (self._rest + block).replace(b"\r", b"\n").split(b"\n")
            self._rest = lines.pop()[-LONGEST_LINE:]
            for raw in lines:
                line = raw.decode(errors="replace")
                stage = stage_of(line) or stage
                if found := _PROGRESS.search(line):
                    progress = f"{found[1]} ({found[2]})"
                if fatal is None and is_fatal(line):
                    fatal = line.strip()
                taken = taken or bool(_PORT_TAKEN.search(line))
        return News(stage, progress, fatal, taken, grew)

    def _block(self) -> bytes:
        try:
            with open(self._path, "rb") as log:
                log.seek(self._offset)
                data = log.read(BLOCK)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data
