"""What a user does to a run, and what can happen to it, on a real Airflow with a fake vLLM."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from airflow_provider_vllm.server.processes import ProcessId, identity_of, read_stat
from scripts.airflow_stack import AirflowStack
from tests.stack.observed import KILL_S, Observed
from tests.stack.scene import (
    QUICK,
    SLOW,
    SOME_SECONDS,
    Scenarios,
    Scene,
    answers_of,
    side_by_side,
    start_of,
)

pytestmark = pytest.mark.stack

NO_MEMORY = (
    "ValueError: No available memory for the cache blocks. "
    "Try increasing `gpu_memory_utilization` when initializing the engine."
)
# A lease that is short, and longer than Airflow takes from one task to the next.
IDLE_S = 15
KILLED = "The task was killed: it was marked or cleared"
# A shared server's teardown may come before the kill.
STOPPED = "while this batch ran, so this try does not start it again"

scenario = Scenarios()


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    shared_airflow: AirflowStack,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[None]]]:
    folder = tmp_path_factory.mktemp("scenarios")
    with side_by_side(scenario, request, shared_airflow, folder) as running:
        yield running


def airflow_supervisor(run: Observed, task_id: str) -> tuple[ProcessId, ProcessId]:
    """The process that runs a task now, and Airflow's own that watches it."""
    pid = run.wait(
        lambda: run.client.task(run.dag_id, run.run_id, task_id).pid, f"{task_id} has a pid"
    )
    runner = identity_of(pid)
    stat = read_stat(pid)
    assert runner
    assert stat
    watcher = identity_of(stat.parent)
    assert watcher
    return runner, watcher


# -- starts that fail --------------------------------------------------------------------------


@scenario
def a_start_that_fails_once_is_retried_and_the_run_is_green(scene: Scene) -> None:
    plan = {"fail_at": "load weights", "fail_times": 1}
    run = scene.run("vllm_shared", plan, env={"SOME_TOKEN": "s3cret-value"})
    assert run.finish() == "success"
    assert "up_for_retry" in run.seen["start_vllm_server"]
    assert run.tries("start_vllm_server") == ["failed", "success"]
    assert run.states() == dict.fromkeys(
        ("start_vllm_server", "work", "stop_vllm_server"), "success"
    )
    assert answers_of(run) == QUICK
    assert "vLLM did not become ready" in run.log("start_vllm_server", 1)
    shown = run.client.task(run.dag_id, run.run_id, "start_vllm_server").rendered_fields
    assert "SOME_TOKEN" in str(shown)
    assert "s3cret-value" not in str(shown)
    assert "s3cret-value" not in str(run.xcom("start_vllm_server"))
    run.nothing_left()


@scenario
def a_server_that_never_starts_fails_after_its_retries_with_the_cause(scene: Scene) -> None:
    run = scene.run("vllm_shared", {"fail_at": "warm up", "fail_line": NO_MEMORY})
    assert run.finish() == "failed"
    assert run.tries("start_vllm_server") == ["failed"] * 3
    assert run.states() == {
        "start_vllm_server": "failed",
        "work": "upstream_failed",
        "stop_vllm_server": "upstream_failed",
    }
    diagnosis = run.xcom("start_vllm_server", "diagnosis")
    assert diagnosis["group"] == "capacity"
    end = "\n".join(run.log("start_vllm_server", 3).splitlines()[-25:])
    for words in (NO_MEMORY, diagnosis["first_action"], "Exit status: 1, stage: warm up"):
        assert words in end
    run.nothing_left()


@scenario
def a_start_is_marked_failed_while_the_server_loads(scene: Scene) -> None:
    run = scene.run("vllm_shared", {"never_ready": True, "ignore_term": True})
    run.wait(lambda: [s for s in run.servers() if s.stage == "load weights"], "it loads")
    run.mark("start_vllm_server", "failed")
    assert run.finish() == "failed"
    assert run.state("work") == "upstream_failed"
    run.nothing_left(KILL_S)
    run.wait(lambda: KILLED in run.log("start_vllm_server"), "the log says why", timeout=KILL_S)


# -- the work ----------------------------------------------------------------------------------


@scenario
def work_that_fails_is_retried_and_the_teardown_runs(scene: Scene) -> None:
    run = scene.run("vllm_shared", prompts=[*QUICK, "[[status 400]]"])
    assert run.finish() == "failed"
    assert run.tries("work") == ["failed"] * 3
    assert (run.state("work"), run.state("stop_vllm_server")) == ("failed", "success")
    assert len(run.servers()) == 1, "the start is not rerun for a retry of the work"
    assert run.xcom("work", "manifest")["errors"] == 1
    run.nothing_left()


@scenario
def a_retry_sends_only_the_rows_that_have_no_answer(scene: Scene) -> None:
    prompts = [*QUICK, "[[once 400]]"]
    run = scene.run("vllm_shared", prompts=prompts)
    assert run.finish() == "success"
    assert run.tries("work") == ["failed", "success"]
    assert answers_of(run) == prompts
    assert run.xcom("work", "manifest")["reused"] == len(QUICK)
    run.nothing_left()


@scenario
def execution_timeout_of_a_batch_with_its_own_server(scene: Scene) -> None:
    run = scene.run("vllm_own_server_times_out", prompts=SLOW)
    assert run.finish() == "failed"
    assert "AirflowTaskTimeout" in run.log("work")
    run.nothing_left()


@scenario
def dagrun_timeout_skips_the_teardown_and_the_lease_ends_the_server(scene: Scene) -> None:
    run = scene.run("vllm_shared_run_times_out", prompts=SLOW, idle_timeout=IDLE_S)
    assert run.finish() == "failed"
    run.wait(lambda: run.state("stop_vllm_server") == "skipped", "the teardown is skipped")
    run.nothing_left(KILL_S + IDLE_S)
    assert [server.reason for server in run.servers()] == ["idle"]


# -- a person at the UI ------------------------------------------------------------------------


@scenario
def work_is_marked_failed_then_cleared_with_only_failed(scene: Scene) -> None:
    """The second half: there is no server, so the batch starts it from the handle, and its lease ends it."""
    run = scene.run("vllm_shared", prompts=SOME_SECONDS, idle_timeout=IDLE_S)
    run.wait_for_requests()
    run.mark("work", "failed")
    assert run.finish() == "failed"
    assert run.states() == {
        "start_vllm_server": "success",
        "work": "failed",
        "stop_vllm_server": "success",
    }
    run.nothing_left(KILL_S)
    run.wait(
        lambda: any(why in run.log("work") for why in (KILLED, STOPPED)),
        "the log says why",
        timeout=KILL_S,
    )

    assert run.clear("start_vllm_server", "work", "stop_vllm_server", only_failed=True) == ["work"]
    assert run.finish() == "success"
    assert answers_of(run) == start_of(SOME_SECONDS)
    assert run.xcom("work", "manifest")["reused"] >= len(QUICK)
    assert "does not run" in run.log("work", 2)
    run.nothing_left(IDLE_S + 7)
    assert [server.reason for server in run.servers()] == ["asked", "idle"]


@scenario
def work_is_marked_success(scene: Scene) -> None:
    run = scene.run("vllm_shared", prompts=SLOW)
    run.wait_for_requests()
    run.mark("work", "success")
    assert run.finish() == "success"
    assert set(run.states().values()) == {"success"}
    run.nothing_left(KILL_S)


@scenario
def the_run_is_marked_failed(scene: Scene) -> None:
    run = scene.run("vllm_shared", prompts=SLOW)
    run.wait_for_requests()
    run.mark_run("failed")
    assert run.finish() == "failed"
    assert run.state("work") == "failed"
    run.nothing_left(KILL_S)
    assert run.state("stop_vllm_server") == "success", "the teardown runs"


@scenario
def a_batch_with_its_own_server_is_marked_failed(scene: Scene) -> None:
    run = scene.run("vllm_own_server", {"ignore_term": True}, prompts=SLOW)
    run.wait_for_requests()
    run.mark("work", "failed")
    assert run.finish() == "failed"
    run.nothing_left(KILL_S)
    run.wait(lambda: KILLED in run.log("work"), "the log says why", timeout=KILL_S)


@scenario
def a_batch_with_its_own_server_is_cleared_while_it_runs(scene: Scene) -> None:
    run = scene.run("vllm_own_server", prompts=SOME_SECONDS)
    run.wait_for_requests()
    assert run.clear("work") == ["work"]
    assert run.finish() == "success"
    assert answers_of(run) == start_of(SOME_SECONDS)
    assert run.client.task(run.dag_id, run.run_id, "work").try_number == 2
    assert len(run.servers()) == 2, "each try has had one server, and no try ended the other's"
    assert run.xcom("work", "manifest")["server_losses"] == 0
    run.nothing_left(KILL_S)


@scenario
def work_on_a_shared_server_is_cleared_while_it_runs(scene: Scene) -> None:
    run = scene.run("vllm_shared", prompts=SOME_SECONDS)
    run.wait_for_requests()
    run.clear("work")
    assert run.finish() == "success"
    assert answers_of(run) == start_of(SOME_SECONDS)
    run.nothing_left(KILL_S)


@scenario
def a_finished_run_is_cleared_and_all_of_it_runs_again(scene: Scene) -> None:
    run = scene.run("vllm_shared")
    assert run.finish() == "success"
    run.nothing_left()
    cleared = run.clear("start_vllm_server", "work", "stop_vllm_server")
    assert sorted(cleared) == ["start_vllm_server", "stop_vllm_server", "work"]
    assert run.finish() == "success"
    assert {each.try_number for each in run.client.tasks(run.dag_id, run.run_id)} == {2}
    assert answers_of(run) == QUICK
    assert len(run.servers()) == 2
    run.nothing_left()


# -- the sensor --------------------------------------------------------------------------------


@scenario
def the_sensor_waits_in_poke_mode(scene: Scene) -> None:
    run = scene.run("vllm_sensor_poke", {"start_s": 6})
    assert run.finish() == "success"
    assert answers_of(run) == QUICK
    assert "load weights" in run.log("ready")
    run.nothing_left()


@scenario
def the_sensor_waits_in_reschedule_mode(scene: Scene) -> None:
    run = scene.run("vllm_sensor_reschedule", {"start_s": 9})
    assert run.finish() == "success"
    assert "up_for_reschedule" in run.seen["ready"]
    assert answers_of(run) == QUICK
    run.nothing_left()


@scenario
def the_sensor_fails_at_once_with_the_diagnosis(scene: Scene) -> None:
    plan = {"start_s": 3, "fail_at": "warm up", "fail_line": NO_MEMORY}
    run = scene.run("vllm_sensor_poke", plan)
    assert run.finish() == "failed"
    assert run.states() == {
        "start_vllm_server": "success",
        "ready": "failed",
        "work": "upstream_failed",
        "stop_vllm_server": "success",
    }
    ended_at = run.servers()[0].ended_at
    heard = run.client.tries(run.dag_id, run.run_id, "ready")[0]["end_date"]
    assert ended_at
    assert run.seconds_between(ended_at, heard) < 10
    assert run.xcom("ready", "diagnosis")["group"] == "capacity"
    assert NO_MEMORY in run.log("ready")
    run.nothing_left()


# -- faults ------------------------------------------------------------------------------------


@scenario
def a_server_killed_under_two_batches_is_started_once_again(scene: Scene) -> None:
    run = scene.run("vllm_two_batches", prompts=SOME_SECONDS)
    run.wait(
        lambda: (
            [run.state(t) for t in ("one", "other")] == ["running"] * 2
            and run.requests_running() == 4
        ),
        "both have rows in flight",
    )
    engine = run.servers()[-1].engine
    assert engine
    engine.signal(signal.SIGKILL)
    assert run.finish() == "success"
    for task_id in ("one", "other"):
        assert answers_of(run, task_id) == start_of(SOME_SECONDS)
        assert run.xcom(task_id, "manifest")["server_losses"] == 1
        assert run.tries(task_id) == ["success"]
    assert len(run.servers()) == 2, "one new start"
    assert run.servers()[0].exit_status == -9
    run.nothing_left()


@scenario
def a_server_that_dies_with_its_batch_too_often_leaves_the_diagnosis(scene: Scene) -> None:
    run = scene.run("vllm_own_server", {"die_after": 1.5}, prompts=SLOW)
    run.wait_for_state("work", "up_for_retry")
    assert "it was restarted as often as server_restarts allows" in run.log("work")
    assert run.xcom("work", "diagnosis")["group"] == "dead_process"
    run.nothing_left()
    run.mark("work", "failed")
    assert run.finish() == "failed"


@scenario
def the_worker_is_shut_down_while_a_batch_runs(scene: Scene) -> None:
    """SIGTERM to the Airflow process that watches the task."""
    run = scene.run("vllm_own_server", prompts=SOME_SECONDS)
    run.wait_for_requests()
    _, watcher = airflow_supervisor(run, "work")
    watcher.signal(signal.SIGTERM)
    run.wait_for_state("work", "up_for_retry", timeout=KILL_S)
    run.nothing_left()
    run.wait(lambda: KILLED in run.log("work"), "the log says why", timeout=KILL_S)
    assert run.finish() == "success"
    assert answers_of(run) == start_of(SOME_SECONDS)
    assert run.xcom("work", "manifest")["reused"] >= len(QUICK)
    run.nothing_left()


@scenario
def the_task_process_is_killed(scene: Scene) -> None:
    run = scene.run("vllm_own_server", {"ignore_term": True}, prompts=SOME_SECONDS)
    run.wait_for_requests()
    runner, _ = airflow_supervisor(run, "work")
    first = run.servers()[0]
    runner.signal(signal.SIGKILL)
    began = time.monotonic()
    run.wait(lambda: run.servers()[0].settled, "the server ends with its owner", timeout=10)
    assert time.monotonic() - began < 8
    assert run.servers()[0].reason in ("owner_gone", "asked")
    assert not [process for process in first.tree if process.alive]
    assert run.finish() == "success"
    assert run.tries("work") == ["failed", "success"]
    assert answers_of(run) == start_of(SOME_SECONDS)
    run.nothing_left()


@pytest.mark.parametrize("name", list(scenario))
def test_scenario(name: str, outcomes: dict[str, Future[None]]) -> None:
    outcomes[name].result()
