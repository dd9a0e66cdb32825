"""What this package itself writes into vllm.log is known to the diagnosis."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.server import guard


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    control, hold = os.pipe()
    status, report = os.pipe()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", guard.__file__),
                *(str(fd) for fd in (control, report, out.fileno())),
                *("60", str(tmp_path / "no-such-python"), "-m", "vllm"),
            ],
            pass_fds=(control, report, out.fileno()),
        )
        os.close(report)
    try:
        with open(status, encoding="utf-8") as said:
            exit_status = next(int(line.split()[1]) for line in said if line.startswith("exit"))
            os.close(hold)
            hold = -1
            said.read()
    finally:
        if hold >= 0:
            os.close(hold)
        process.wait(timeout=30)
        os.close(control)
    assert exit_status == 127
    found = diagnose(log, exit_status=exit_status)
    assert (found.verdict, found.group, found.cause) == (
        "failed",
        "environment",
        "command_not_started",
    )
    assert found.root_line == log.read_text().splitlines()[0]
    assert not found.retry_launch
    assert "no-such-python" in found.root_line
