"""Airflow's UI on localhost with the example DAGs, until Ctrl-C.

Enters: what set_up.py made, `MODEL` and `PORT` of the environment. Leaves: the address, the login and
how to use the command line on stdout, and a connection `vllm_default` to change. Ctrl-C, or a TERM, ends
Airflow and every server that its tasks started.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from scripts.airflow_config import USER
from scripts.airflow_stack import AirflowStack, StackFailed
from scripts.example_airflow import example_airflow, example_model
from scripts.progress import Progress
from scripts.set_up import ROOT

HOME = ROOT / ".demo" / "ui"
# Where `vllm serve` listens when nobody says otherwise: for example_existing_server.
CONNECTION = {"conn_type": "vllm", "host": "127.0.0.1", "port": 8000}
# Else the form of a connection has no button to try it.
SETTINGS = {"core": {"test_connection": "Enabled"}}


def main(home: Path = HOME) -> int:
    """Run with the Airflow of `home` until interrupted; the exit status."""
    # SIGINT too: it is ignored in what a script starts in the background, and Ctrl-C has to work there.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    progress = Progress(2)
    try:
        port = int(os.environ.get("PORT") or 0)
        stack = example_airflow(
            home, [ROOT / "dags"], progress, port=port, settings=SETTINGS, environ=hub()
        )
    except StackFailed as error:
        print(error, file=sys.stderr)
        return 1
    try:
        stack.start()
        stack.client.add_connection("vllm_default", **CONNECTION)
        print(greeting(stack, home), flush=True)
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
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # once is enough: the end takes seconds
        for line in stack.stop():
            progress.say(f"ended a process that a task had started: {line}")
        progress.say("ended")


def hub() -> dict[str, str]:
    """A DAG of one's own may name a model of the hub, whatever the examples serve."""
    return {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}


def greeting(stack: AirflowStack, home: Path) -> str:
    """What a person needs to go on from here."""
    airflow = Path(sys.executable).with_name("airflow")
    return f"""
  {stack.url}
  user {USER}, password {stack.password}

  model: {example_model()}
  DAGs: {ROOT / "dags"}
  task logs: {home / "logs"}
  servers: {home / "vllm"}
  connection vllm_default: {CONNECTION["host"]}:{CONNECTION["port"]}, change it under Admin, Connections

  In another terminal:
    export AIRFLOW_HOME={shlex.quote(str(home))}
    {shlex.quote(str(airflow))} vllm servers

Ctrl-C ends Airflow and every server."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
