"""`airflow vllm …` as a person on the worker calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import Servers, fake_spec, servers

__all__ = ["servers"]


def airflow(home: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "airflow", *arguments],
        env={**os.environ, "AIRFLOW_HOME": str(home), "NO_COLOR": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_servers_are_listed_and_stopped(servers: Servers, tmp_path: Path) -> None:
    servers.start(fake_spec(), "one", task="some_dag.some_task run try 1")
    root = ("--state-root", str(servers.root.path))

    listed = airflow(tmp_path, "vllm", "servers", *root)
    assert listed.returncode == 0
    (row,) = [line for line in listed.stdout.splitlines() if line.startswith("one ")]
    assert "ready" in row
    assert "tiny" in row
    assert "some_dag.some_task run try 1" in row

    refused = airflow(tmp_path, "vllm", "stop", *root)
    assert refused.returncode == 2
    stopped = airflow(tmp_path, "vllm", "stop", "one", *root)
    assert (stopped.returncode, "one: ended" in stopped.stdout) == (0, True)
    assert servers.tree("one") == []

    (state,) = [
        json.loads(line)
        for line in airflow(
            tmp_path, "vllm", "servers", "--all", "--json", *root
        ).stdout.splitlines()
        if line.startswith("{")
    ]
    assert (state["server_id"], state["state"]) == ("one", "stopped")
    again = airflow(tmp_path, "vllm", "stop", "--all", *root)
    assert (again.returncode, "no server" in again.stdout) == (0, True)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_is_diagnosed_from_stdin(tmp_path: Path, as_json: bool) -> None:
    log = (
        "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510] EngineCore failed to start.\n"
        "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510] Traceback (most recent call last):\n"
        '(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510]   File "a.py", line 1, in load_model\n'
        "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510] torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free.\n"
    )
    options = ["--json"] if as_json else []
    done = airflow(tmp_path, "vllm", "diagnose", *options, stdin=log)
    assert done.returncode == 1
    if as_json:
        found = json.loads(done.stdout[done.stdout.index("{") :])
        assert found["group"] == "capacity"
        assert "CUDA out of memory" in found["root_line"]
    else:
        assert "CUDA out of memory" in done.stdout
        assert "First action" in done.stdout


def test_a_log_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    done = airflow(tmp_path, "vllm", "diagnose", str(tmp_path / "none.log"))
    assert done.returncode == 3
    assert "none.log" in done.stderr
