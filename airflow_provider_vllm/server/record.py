"""The supervisor's own book: its ServerState in memory and in state.json, always the same."""

from __future__ import annotations

import logging
import time
from typing import Any

from airflow_provider_vllm.server.state import GenerationDir, ServerState, write_json

log = logging.getLogger("supervisor")


class Record:
    """The state of one start. `write` changes it and the file in one step."""

    def __init__(self, directory: GenerationDir, first: ServerState) -> None:
        self.dir = directory
        self.state = first

    def write(self, **changes: Any) -> None:
        """Change the state and write it, where that changes anything."""
        now = time.time()
        if "stage" in changes and changes["stage"] != self.state.stage:
            changes["stage_since"] = now
        changed = self.state.but(**changes)
        if changed == self.state and self.state.updated_at:
            return
        if changed.state != self.state.state:
            log.info("%s: %s", changed.state, changed.message or "")
        self.state = changed.but(updated_at=now)
        write_json(self.dir.state_file, self.state.to_json())
