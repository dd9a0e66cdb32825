"""One batch in a process of its own, for the tests that kill it. Prints its manifest.

SIGUSR1 raises in the main thread, as Airflow's `on_kill` does. Exit status 3: BatchFailed, 4: the signal.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from airflow_provider_vllm.batch.run import run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed
from tests.batch.helpers import ForeignLink


class Killed(Exception):
    """What the signal handler raises."""


def kill(*_: object) -> None:
    raise Killed


def main() -> int:
    arguments = json.loads(sys.argv[1])
    signal.signal(signal.SIGUSR1, kill)
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
    print(json.dumps(result.manifest.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
