"""What can happen on a worker with GPUs, and to its scheduler: on a real Airflow of the module's own.

Its GPUs are those of the stub library, through the real pynvml in tasks and supervisors; the servers
are fakes. Each scenario has a GPU to itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from airflow_provider_vllm.server.processes import descendants, identity_of
from airflow_provider_vllm.server.state import ServerState
from scripts.airflow_stack import AirflowStack
from scripts.example_airflow import example_airflow
from tests.fakes.nvml import FakeGpu, NvmlStub
from tests.stack.conftest import TEST_DAGS
from tests.stack.observed import Observed
from tests.stack.scene import (
    QUICK,
    SOME_SECONDS,
    Scenarios,
    Scene,
    answers_of,
    own_folder,
    side_by_side,
    start_of,
)

pytestmark = pytest.mark.stack

WAITING, RACE, TAKEN = (FakeGpu(f"GPU-{name}") for name in ("waiting", "race", "taken"))
# A scheduler that has said nothing for so long counts as dead, and its tasks are started again by another
# one. A batch of LONG takes longer.
DEAD_S = 20
LONG = [*QUICK, *(f"[[slow 3]] row {number}" for number in range(2 * DEAD_S))]

scenario, last_scenario = Scenarios(), Scenarios()


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowStack]:
    home = tmp_path_factory.mktemp("worker") / "airflow"
    stub = NvmlStub.build(home.with_name("nvml"))
    stub.write(WAITING, RACE, TAKEN)
    orphans = {
        "orphaned_tasks_check_interval": "5",
        "scheduler_health_check_threshold": str(DEAD_S),
    }
    with example_airflow(
        home, [TEST_DAGS], settings={"scheduler": orphans}, environ=stub.environ
    ) as stack:
        yield stack


def stub_of(run: Observed) -> NvmlStub:
    return NvmlStub(run.stack.home.with_name("nvml"))


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, airflow: AirflowStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    folder = tmp_path_factory.mktemp("scenarios")
    with side_by_side(scenario, request, airflow, folder) as running:
        yield running


def lives(runs: list[Observed]) -> list[tuple[float, float]]:
    """(start, end) of every server that had a GPU, the earliest first.

    A start is written down a moment before it looks for a GPU, which it may then get from one that ends in between.
    """

    def had_one(server: ServerState) -> bool:
        return bool(server.gpus) and server.ended_at is not None

    servers = [server for run in runs for server in run.servers() if had_one(server)]
    return sorted((server.started_at, server.ended_at or 0.0) for server in servers)


@scenario
def a_start_waits_for_a_gpu_and_gives_its_slot_back(scene: Scene) -> None:
    first = scene.run("vllm_shared", prompts=SOME_SECONDS, gpus=(WAITING.uuid,))
    first.wait_for_requests()
    second = scene.run("vllm_shared", gpus=(WAITING.uuid,))
    second.wait_for_state("start_vllm_server", "up_for_reschedule")
    pid = second.client.task(second.dag_id, second.run_id, "start_vllm_server").pid
    second.wait(lambda: not pid or identity_of(pid) is None, "its process is gone", timeout=10)
    assert [first.finish(), second.finish()] == ["success"] * 2
    assert (answers_of(first), answers_of(second)) == (start_of(SOME_SECONDS), QUICK)
    log = second.log("start_vllm_server")
    assert "The worker slot is given back" in log
    assert f"locked by {first.servers()[0].server_id}" in log
    assert second.tries("start_vllm_server") == ["success"], "a wait is no try"
    (_, ended), (began, _) = lives([first, second])
    assert began > ended - 1
    for run in (first, second):
        run.nothing_left()


@scenario
def two_starts_race_for_one_gpu(scene: Scene) -> None:
    runs = [scene.run("vllm_own_server", gpus=(RACE.uuid,)) for _ in range(3)]
    assert [run.finish() for run in runs] == ["success"] * 3
    assert [answers_of(run) for run in runs] == [QUICK] * 3
    assert [run.tries("work") for run in runs] == [["success"]] * 3
    times = lives(runs)
    assert len(times) == 3
    assert all(began > ended - 1 for (_, ended), (began, _) in pairwise(times)), times
    for run in runs:
        run.nothing_left()


@scenario
def the_gpu_of_a_dead_server_is_taken_before_its_batch_starts_it_again(scene: Scene) -> None:
    run = scene.run("vllm_own_server", prompts=SOME_SECONDS, gpus=(TAKEN.uuid,))
    run.wait_for_requests()
    # Another program's, so that no lock tells of it.
    stub_of(run).write(WAITING, RACE, replace(TAKEN, used=TAKEN.total))
    engine = run.servers()[-1].engine
    assert engine
    engine.signal(signal.SIGKILL)
    run.wait_for_state("work", "up_for_reschedule")
    stub_of(run).write(WAITING, RACE, TAKEN)
    assert run.finish() == "success"
    assert run.tries("work") == ["success"]
    assert answers_of(run) == start_of(SOME_SECONDS)
    assert run.xcom("work", "manifest")["reused"] >= len(QUICK)
    run.nothing_left()


@pytest.mark.parametrize("name", list(scenario))
def test_scenario(name: str, outcomes: dict[str, Future[None]]) -> None:
    outcomes[name].result()


# -- what would disturb the others -------------------------------------------------------------


@last_scenario
def the_scheduler_is_killed_and_started_again_while_a_batch_runs(scene: Scene) -> None:
    """The new one finds a task that no living scheduler has started, and starts it again."""
    run = scene.run("vllm_own_server", prompts=LONG)
    run.wait_for_requests()
    scheduler = run.stack.pids["scheduler"]
    executors = [stat.identity for stat in descendants(scheduler) if stat.parent == scheduler]
    os.kill(scheduler, signal.SIGKILL)
    run.stack.start_part("scheduler")
    assert run.finish() == "success"
    assert answers_of(run) == start_of(LONG)
    assert run.client.task(run.dag_id, run.run_id, "work").try_number == 2
    assert run.xcom("work", "manifest")["reused"] >= len(QUICK)
    run.nothing_left(20)
    # Airflow's own: nobody tells the executor's processes that their scheduler is gone.
    for process in executors:
        process.signal(signal.SIGKILL)


@pytest.mark.usefixtures("outcomes")
@pytest.mark.parametrize("name", list(last_scenario))
def test_last_scenario(name: str, airflow: AirflowStack, tmp_path: Path) -> None:
    last_scenario[name](Scene(airflow, own_folder(tmp_path, name)))
