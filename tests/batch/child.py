"""One batch in a process of its own, for the tests that kill it. Prints its manifest.

SIGUSR1 raises in the main thread, as Airflow's `on_kill` does. Exit status 3: BatchFailed, 4: the signal.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from airflow_provider_vllm.batch.run import run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed
from tests.batch.helpers import ForeignLink


class Killed(Exception):
    """What the signal handler raises."""


def kill(*_: object) -> None:
    raise Killed


class Writes:
    """Counts every call that changes a file, in any thread; kills the process before number `die_at`."""

    NAMES = frozenset(
        {
            "write",
            "fsync",
            "fdatasync",
            "replace",
            "rename",
            "unlink",
            "mkdir",
            "truncate",
            "flush",
            "close",
        }
    )

    def __init__(self, die_at: int) -> None:
        self.count, self._die_at = 0, die_at
        if die_at:
            threading.setprofile(self._see)
            sys.setprofile(self._see)

    def _see(self, frame: object, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in self.NAMES:
            self.count += 1
            if self.count == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    arguments = json.loads(sys.argv[1])
    signal.signal(signal.SIGUSR1, kill)
    writes = Writes(arguments["die_at"])
    if arguments["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (arguments["limit"], resource.RLIM_INFINITY))
    try:
        result = run_batch(
            BatchSpec(**arguments["spec"]),
            ForeignLink(arguments["url"]),
            journal_dir=arguments["journal"],
            log=logging.getLogger(),
        )
    except BatchFailed as error:
        print(error)
        return 3
    except Killed:
        return 4
    print(json.dumps({**result.manifest.to_json(), "writes": writes.count}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
