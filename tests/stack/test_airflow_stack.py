"""The stack that other tests stand on: it is a real Airflow, and nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.airflow_client import AirflowClient, ApiError, WaitTimedOut
from scripts.airflow_stack import AirflowStack, StackFailed
from scripts.reaper import descendants
from scripts.set_up import ROOT
from tests.stack.conftest import MakeStack

pytestmark = pytest.mark.stack

DAG = "stack_check"


def test_a_run_goes_green_with_xcom_mapped_tasks_and_a_retry(client: AirflowClient) -> None:
    run = client.run_dag(DAG, {"numbers": [3, 4]})

    assert client.finish(DAG, run, timeout=90) == "success"
    assert client.xcom(DAG, run, "double", map_index=1) == 8
    assert client.task(DAG, run, "fails_once").try_number == 2
    assert [each["state"] for each in client.tries(DAG, run, "fails_once")] == ["failed", "success"]
    first_try = client.log(DAG, run, "fails_once", try_number=1)
    assert "RuntimeError: the first try fails on purpose" in first_try
    assert "doubling 3" in client.log(DAG, run, "double", map_index=0)


def test_clearing_runs_a_task_again_with_what_comes_after_it(client: AirflowClient) -> None:
    run = client.run_dag(DAG)
    assert client.finish(DAG, run, timeout=90) == "success"

    cleared = client.clear(DAG, run, [("double", 0)], downstream=True)

    assert sorted(cleared) == ["double", "fails_once"]
    assert client.finish(DAG, run, timeout=90) == "success"
    assert client.task(DAG, run, "double", map_index=0).try_number == 2
    assert client.task(DAG, run, "double", map_index=1).try_number == 1


def test_clearing_only_failed_tasks_leaves_the_others_alone(client: AirflowClient) -> None:
    run = client.run_dag(DAG)
    assert client.finish(DAG, run, timeout=90) == "success"
    client.mark(DAG, run, "fails_once", "failed")

    assert client.clear(DAG, run, ["numbers"], only_failed=True, downstream=True) == ["fails_once"]
    assert client.finish(DAG, run, timeout=90) == "success"


def test_a_running_task_can_be_marked_failed(client: AirflowClient) -> None:
    run = client.run_dag("stack_waits")
    client.wait_for(
        lambda: client.states("stack_waits", run),
        lambda states: states["wait"] == "running",
        timeout=60,
        what="the task runs",
    )

    client.mark("stack_waits", run, "wait", "failed")

    assert client.finish("stack_waits", run, timeout=60) == "failed"


def test_a_wait_that_times_out_says_what_it_saw(client: AirflowClient) -> None:
    with pytest.raises(WaitTimedOut, match="a miracle: not within 0 s; last seen: nothing yet"):
        client.wait_for(lambda: "nothing yet", lambda _: False, timeout=0, what="a miracle")


def test_a_refused_request_says_why(client: AirflowClient) -> None:
    with pytest.raises(ApiError, match="404"):
        client.run_state("no_such_dag", "no_such_run")


def test_a_process_that_a_task_left_is_found_and_ended(make_stack: MakeStack) -> None:
    stack = make_stack()
    run = stack.client.run_dag("stack_leaves_a_process")
    assert stack.client.finish("stack_leaves_a_process", run, timeout=90) == "success"
    pid = stack.client.xcom("stack_leaves_a_process", run, "leave")

    assert stack.strays() == [f"{pid} sleep 600"]
    assert stack.stop() == [f"{pid} sleep 600"]
    assert not Path(f"/proc/{pid}").exists()


def test_killing_the_process_that_started_it_ends_all_of_it(tmp_path: Path) -> None:
    """As when pytest is killed: no `finally` runs, and still nothing is left."""
    program = (
        "import sys, time; from pathlib import Path;"
        "from scripts.airflow_stack import AirflowStack;"
        "stack = AirflowStack(Path(sys.argv[1]), [Path(sys.argv[2])]);"
        "stack.start_part('scheduler'); stack.start_part('triggerer');"
        "print('started', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "started\n"
        started = descendants(starter.pid)
        assert len(started) >= 3  # the reaper and two parts

        starter.send_signal(signal.SIGKILL)

    deadline = time.monotonic() + 60
    while (left := [pid for pid in started if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_a_part_can_be_killed_and_started_again(make_stack: MakeStack) -> None:
    stack: AirflowStack = make_stack()
    os.kill(stack.pids["scheduler"], signal.SIGKILL)

    stack.start_part("scheduler")

    run = stack.client.run_dag(DAG)
    assert stack.client.finish(DAG, run, timeout=120) == "success"
    assert "SIGKILL" in stack.part_log("scheduler").read_text()
    # Airflow's own leftovers: nobody tells the idle workers that their scheduler is gone.
    assert all("LocalExecutor" in line for line in stack.stop())


@pytest.mark.full
def test_it_runs_on_postgresql(make_stack: MakeStack, postgres_url: str) -> None:
    stack = make_stack(database=postgres_url)
    run = stack.client.run_dag(DAG)
    assert stack.client.finish(DAG, run, timeout=120) == "success"
    assert not (stack.home / "airflow.db").exists()


def test_a_second_airflow_in_the_same_home_is_refused(tmp_path: Path) -> None:
    first = AirflowStack(tmp_path, [tmp_path])
    config = (tmp_path / "airflow.cfg").read_text()
    with pytest.raises(StackFailed, match="end that one first"):
        AirflowStack(tmp_path, [tmp_path], fresh=True)
    assert (tmp_path / "airflow.cfg").read_text() == config
    first.stop()
    AirflowStack(tmp_path, [tmp_path], fresh=True).stop()


def test_secrets_outlive_a_restart_and_are_private(tmp_path: Path) -> None:
    for _ in range(2):
        AirflowStack(tmp_path, [tmp_path]).stop()
        for name in ("airflow.cfg", "passwords.json"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        lines = (tmp_path / "airflow.cfg").read_text().splitlines()
        secrets = [line for line in lines if line.startswith(("fernet_key", "jwt_secret"))]
        (tmp_path / "secrets").touch()
        assert (tmp_path / "secrets").read_text() in ("", str(secrets))
        (tmp_path / "secrets").write_text(str(secrets))
    assert len(secrets) == 2


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
