"""`make ui` from the outside: it says where to log in and what to type, and Ctrl-C ends all of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.airflow_client import AirflowClient
from scripts.set_up import ROOT

pytestmark = pytest.mark.stack


@contextmanager
def ended_at_last(command: list[str], **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is told to end, should it still run afterwards."""
    with subprocess.Popen(command, **how) as process:
        try:
            yield process
        finally:
            process.terminate()


def run_as_told(text: str) -> str:
    """What the commands print that the greeting says to type in another terminal."""
    _, _, after = text.partition("In another terminal:\n")
    commands = [line for line in after.splitlines() if line.startswith("    ")]
    done = subprocess.run(
        ["sh", "-ec", "\n".join(commands)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_login_works_and_a_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "import sys, pathlib; from scripts import ui; sys.exit(ui.main(pathlib.Path(sys.argv[1])))"
    )
    with ended_at_last(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        text = ""
        while "Ctrl-C" not in text:
            line = process.stdout.readline()
            assert line, f"ended early: {text}"
            text += line

        (url,) = re.findall(r"http://127\.0\.0\.1:\d+", text)
        ((user, password),) = re.findall(r"user (\S+), password (\S+)", text)
        client = AirflowClient(url, user, password)
        client.wait_for_dag("example_one_task")
        connection = client.request("GET", "/connections/vllm_default")
        assert (connection["conn_type"], connection["port"]) == ("vllm", 8000)
        client.add_connection("vllm_default", conn_type="vllm", host="elsewhere")
        assert client.request("GET", "/connections/vllm_default")["host"] == "127.0.0.1", "kept"
        tried = client.request("POST", "/connections/test", json=connection)
        assert (tried["status"], "does not list its models" in tried["message"]) == (False, True)
        client.close()
        assert f"state root {tmp_path / 'vllm'}" in run_as_told(text)

        process.send_signal(number)
        rest = process.stdout.read()

    assert process.returncode == 0
    assert rest.strip().endswith("ended")
