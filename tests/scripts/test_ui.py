"""`make ui` from the outside: it says where to log in, and Ctrl-C ends all of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.airflow_client import AirflowClient
from scripts.set_up import ROOT

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_login_works_and_a_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "import sys, pathlib; from scripts import ui; sys.exit(ui.main(pathlib.Path(sys.argv[1])))"
    )
    with subprocess.Popen(
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
        client.close()

        process.send_signal(number)
        rest = process.stdout.read()

    assert process.returncode == 0
    assert rest.strip().endswith("ended")
