"""The supervisor's own book: its ServerState in memory and in state.json.

Invariant: what is in memory is the truth, and the file follows it. A disk that is full makes the file old,
never the server unwatched: the endpoint goes on telling the truth, and the file is written when it can be.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from airflow_provider_vllm.server.files import write_json
from airflow_provider_vllm.server.state import GenerationDir, ServerState

log = logging.getLogger("supervisor")


class Record:
    """The state of one start. `write` changes it and the file in one step."""

    def __init__(self, directory: GenerationDir, first: ServerState) -> None:
        self.dir = directory
        self.state = first
        self._behind = False

    def write_first(self, **changes: Any) -> bool:
        """The first write; False where this start was called off before it began."""
        self.state = self.state.but(**changes, updated_at=time.time())
        return self.dir.write_first(self.state)

    def write(self, **changes: Any) -> None:
        """Change the state and write it, where that changes anything."""
        now = time.time()
        if "stage" in changes and changes["stage"] != self.state.stage:
            changes["stage_since"] = now
        changed = self.state.but(**changes)
        if changed == self.state and not self._behind:
            return
        if changed.state != self.state.state:
            log.info("%s: %s", changed.state, changed.message or "")
        self.state = changed.but(updated_at=now)
        self._to_file()

    @property
    def directory_is_gone(self) -> bool:
        """Whether somebody removed the directory: then nobody can find or stop this server any more."""
        try:
            self.dir.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # a disk that fails for a moment has not lost it
        return False

    def _to_file(self) -> None:
        try:
            write_json(self.dir.state_file, self.state.to_json())
            self._behind = False
        except OSError as exc:
            if not self._behind:
                log.error("state.json could not be written, it is tried again: %s", exc)
            self._behind = True
