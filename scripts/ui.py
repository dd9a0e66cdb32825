"""Airflow's UI on localhost with the example DAGs, until Ctrl-C.

Enters: what set_up.py made, `MODEL` and `PORT` of the environment. Leaves: the address and the
login on stdout. Ctrl-C, or a TERM, ends Airflow and every server that its tasks started.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from scripts.airflow_config import USER
from scripts.airflow_stack import StackFailed
from scripts.example_airflow import example_airflow, example_model
from scripts.progress import Progress
from scripts.set_up import ROOT

HOME = ROOT / ".demo" / "ui"


def main(home: Path = HOME) -> int:
    """Run with the Airflow of `home` until interrupted; the exit status."""
    # SIGINT too: it is ignored in what a script starts in the background, and Ctrl-C has to work there.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    progress = Progress(2)
    try:
        port = int(os.environ.get("PORT") or 0)
        stack = example_airflow(home, [ROOT / "dags"], progress, port=port)
    except StackFailed as error:
        print(error, file=sys.stderr)
        return 1
    try:
        stack.start()
        print(
            f"\n  {stack.url}\n  user {USER}, password {stack.password}\n\n"
            f"  model: {example_model()}\n  DAGs: {ROOT / 'dags'}\n"
            f"  task logs: {home / 'logs'}\n  servers: {home / 'vllm'}\n\n"
            "Ctrl-C ends Airflow and every server.",
            flush=True,
        )
        while not (dead := stack.dead_parts()):
            time.sleep(1)
        raise StackFailed(f"Died: {', '.join(dead)}. Their logs: {stack.logs}")
    except KeyboardInterrupt:
        return 0
    except StackFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        progress.say("ending")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough: the end takes seconds
        for line in stack.stop():
            progress.say(f"ended a process that a task had started: {line}")
        progress.say("ended")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
