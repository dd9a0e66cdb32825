"""StartVllmServerOperator: what it returns, how it fails, and that a kill unwinds it."""

from __future__ import annotations

import gzip
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm import StartVllmServerOperator, VllmBatchOperator
from airflow_provider_vllm.exceptions import StartFailed, TaskInterrupted
from airflow_provider_vllm.server.state import LOADING, READY, ServerState, StateRoot
from tests.airflow_unit import FakeTaskInstance, context_of
from tests.server.conftest import fake_spec, wait_for


def newest(root: StateRoot) -> ServerState | None:
    directories = root.every_generation()
    return directories[-1].read() if directories else None


@contextmanager
def killed_when(task: Any, what: Callable[[], Any]) -> Iterator[None]:
    """As Airflow does it: SIGTERM, and the handler calls `on_kill` on the main thread."""

    def kill() -> None:
        deadline = time.monotonic() + 20
        while not what() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: task.on_kill())
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        killer.join()
        signal.signal(signal.SIGTERM, before)


def test_the_handle_names_a_server_that_is_ready_and_outlives_the_task(root: StateRoot) -> None:
    handle = StartVllmServerOperator(task_id="start", spec=fake_spec()).execute(context_of())
    state = newest(root)
    assert state
    assert (state.state, state.base_url) == (READY, handle["base_url"])
    assert (handle["server_id"], handle["nonce"]) == (state.server_id, state.nonce)
    assert state.task == "some_dag.some_task some_run try 1"


def test_without_waiting_it_returns_while_the_server_loads(root: StateRoot) -> None:
    spec = fake_spec({"start_s": 3})
    began = time.monotonic()
    task = StartVllmServerOperator(task_id="start", spec=spec, wait_for_ready=False)
    handle = task.execute(context_of())
    assert time.monotonic() - began < 3
    state = newest(root)
    assert state
    assert state.state == LOADING
    assert handle["nonce"] == state.nonce


def test_each_task_instance_has_a_server_of_its_own(root: StateRoot) -> None:
    ids = set()
    for ti in (
        FakeTaskInstance(),
        FakeTaskInstance(map_index=0),
        FakeTaskInstance(map_index=1),
        FakeTaskInstance(run_id="another_run"),
        FakeTaskInstance(dag_id="some_dag_some", task_id="task"),
    ):
        task = StartVllmServerOperator(task_id="start", spec=fake_spec())
        ids.add(task.execute(context_of(ti))["server_id"])
    assert len(ids) == 5
    again = StartVllmServerOperator(task_id="start", spec=fake_spec())
    assert again.execute(context_of(FakeTaskInstance(try_number=2)))["server_id"] in ids


def test_attempts_within_one_try(root: StateRoot, tmp_path: Any) -> None:
    plan = {"fail_at": "load weights", "fail_times": 1, "counter": str(tmp_path / "starts")}
    task = StartVllmServerOperator(task_id="start", spec=fake_spec(plan, start_attempts=2))
    handle = task.execute(context_of())
    assert handle["generation"] == 2
    first, second = (directory.read() for directory in root.every_generation())
    assert first
    assert second
    assert (first.state, first.exit_status, first.settled) == ("failed", 1, True)
    assert first.diagnosis, "the evidence of the failed attempt is kept"
    assert second.state == READY


def test_a_start_that_fails_says_why_and_leaves_nothing(root: StateRoot) -> None:
    context = context_of()
    spec = fake_spec({"fail_at": "warm up", "fail_line": "ValueError: no such thing"})
    with pytest.raises(StartFailed) as caught:
        StartVllmServerOperator(task_id="start", spec=spec).execute(context)
    message = str(caught.value)
    directory = root.every_generation()[-1]
    for words in (
        "ValueError: no such thing",
        "Exit status: 1",
        "warm up",
        str(directory.log_file),
    ):
        assert words in message
    assert context["ti"].xcoms["diagnosis"]["root_line"].endswith("ValueError: no such thing")
    state = newest(root)
    assert state
    assert state.settled


def test_a_kill_during_a_start_unwinds_it_and_ends_the_server(root: StateRoot) -> None:
    spec = fake_spec({"never_ready": True, "ignore_term": True})
    task = StartVllmServerOperator(task_id="start", spec=spec)
    began = time.monotonic()

    def loads() -> bool:
        state = newest(root)
        return state is not None and state.state == LOADING

    with (
        killed_when(task, loads),
        pytest.raises(TaskInterrupted, match="answered rows are kept for the next try"),
    ):
        task.execute(context_of())
    assert time.monotonic() - began < 8
    wait_for(lambda: (state := newest(root)) and state.settled)
    state = newest(root)
    assert state
    assert state.reason == "asked"


def test_a_kill_in_the_first_moment_of_a_start_leaves_nothing_either(root: StateRoot) -> None:
    """The supervisor runs, and the task has not heard of it yet."""
    task = StartVllmServerOperator(task_id="start", spec=fake_spec({"never_ready": True}))
    with killed_when(task, root.every_generation), pytest.raises(TaskInterrupted):
        task.execute(context_of())
    state = newest(root)
    assert state is None or state.settled


def test_a_kill_of_a_batch_unwinds_it_and_ends_its_own_server(root: StateRoot) -> None:
    task = VllmBatchOperator(task_id="ask", spec=fake_spec(), prompts=["[[hang]]"])

    def works() -> bool:
        state = newest(root)
        return state is not None and state.state == READY

    with killed_when(task, works), pytest.raises(TaskInterrupted):
        task.execute(context_of())
    wait_for(lambda: (state := newest(root)) and state.settled)


def test_a_killed_batch_says_so_at_once_however_long_its_server_takes(root: StateRoot) -> None:
    """Airflow ends a killed task by force after five seconds, and then nothing is in its log."""
    spec = fake_spec({"ignore_term": True})
    task = VllmBatchOperator(task_id="ask", spec=spec, prompts=["[[hang]]"])
    ready: list[float] = []

    def works() -> bool:
        state = newest(root)
        if state is None or state.state != READY:
            return False
        ready.append(time.monotonic())
        return True

    with killed_when(task, works), pytest.raises(TaskInterrupted):
        task.execute(context_of())
    assert time.monotonic() - ready[0] < 3
    wait_for(lambda: (state := newest(root)) and state.settled)


def test_a_kill_of_a_batch_leaves_the_shared_server(root: StateRoot) -> None:
    handle = StartVllmServerOperator(task_id="start", spec=fake_spec()).execute(context_of())
    task = VllmBatchOperator(task_id="ask", server=handle, prompts=["[[hang]]"])
    began = time.monotonic()
    with (
        killed_when(task, lambda: time.monotonic() - began > 1.5),
        pytest.raises(TaskInterrupted),
    ):
        task.execute(context_of())
    state = newest(root)
    assert state
    assert state.state == READY


def test_a_kill_while_the_input_is_read(root: StateRoot, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl.gz"
    part = gzip.compress(b'{"prompt": "x"}\n' * 1_000_000)
    source.write_bytes(part * 200)  # gigabytes when it is read
    task = VllmBatchOperator(
        task_id="ask", spec=fake_spec(), input_path=str(source), output_path=f"{tmp_path}/out.jsonl"
    )
    began = time.monotonic()
    with (
        killed_when(task, lambda: time.monotonic() - began > 0.5),
        pytest.raises(TaskInterrupted),
    ):
        task.execute(context_of())
    assert root.every_generation() == []


def test_a_kill_after_the_work_does_nothing() -> None:
    StartVllmServerOperator(task_id="start", spec=fake_spec()).on_kill()
    VllmBatchOperator(task_id="ask", spec=fake_spec(), prompts=["x"]).on_kill()


def test_a_try_that_a_newer_one_has_replaced_does_not_start_the_server_again(
    root: StateRoot,
) -> None:
    """Airflow may start try 2 of a cleared task before try 1 is dead."""
    old = VllmBatchOperator(task_id="ask", spec=fake_spec(), prompts=["[[hang]]"])
    seen: list[BaseException] = []

    def run() -> None:
        try:
            old.execute(context_of())
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: (state := newest(root)) and state.state == READY)
    time.sleep(0.5)
    spec = fake_spec()
    StartVllmServerOperator(task_id="start", spec=spec).execute(
        context_of(FakeTaskInstance(try_number=2))
    )
    thread.join(30)
    assert not thread.is_alive()
    assert "this try does not start it again" in str(seen)
    assert [d.read().state for d in root.every_generation()] == ["stopped", READY]  # type: ignore[union-attr]
