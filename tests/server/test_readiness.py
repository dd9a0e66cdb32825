"""What a state means for whoever waits: decided purely, then waited for on a script of states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_provider_vllm.exceptions import NoFreeGpu, ServerError, ServerLost, StartFailed
from airflow_provider_vllm.server import readiness, state
from airflow_provider_vllm.server.readiness import (
    HAS_FAILED,
    IS_READY,
    WAIT,
    decide,
    start_error,
    wait_until_ready,
)
from airflow_provider_vllm.server.state import ServerState


def seen(what: str, **fields: Any) -> ServerState:
    given = {"started_at": 100.0, "stage_since": 100.0, "model": "tiny", **fields}
    return ServerState("s", 1, "0" * 16, "host", "ns", state=what, **given)


@pytest.mark.parametrize(
    ("current", "alive", "verdict", "said"),
    [
        (seen(state.LAUNCHING), True, WAIT, "launching: 10 s in this stage, 10 s in all"),
        (
            seen(state.LOADING, stage="compile", stage_since=107.0),
            True,
            WAIT,
            "compile: 3 s in this stage, 10 s in all",
        ),
        (
            seen(state.LOADING, stage="load weights", progress="50% (1/2)"),
            True,
            WAIT,
            r"load weights 50% \(1/2\)",
        ),
        (
            seen(state.READY, ready_at=104.0, base_url="http://h:1"),
            True,
            IS_READY,
            "ready at http://h:1 after 4.0 s",
        ),
        (seen(state.READY, ready_at=104.0), False, HAS_FAILED, "supervisor of the server is gone"),
        (
            seen(state.LOADING, stage="import"),
            False,
            HAS_FAILED,
            "supervisor of the server is gone",
        ),
        (seen(state.DRAINING, message="stopped as asked"), True, HAS_FAILED, "stopped as asked"),
        (seen(state.FAILED, message="exit 1", ended_at=109.0), True, WAIT, "collecting evidence"),
        (
            seen(state.FAILED, message="exit 1", ended_at=109.0, settled=True),
            True,
            HAS_FAILED,
            "exit 1",
        ),
        (seen(state.FAILED, message="exit 1", ended_at=109.0), False, HAS_FAILED, "exit 1"),
        (seen(state.FAILED, message="exit 1", ended_at=80.0), True, HAS_FAILED, "exit 1"),
        (seen(state.STOPPED, message="idle", settled=True), False, HAS_FAILED, "idle"),
    ],
)
def test_decide(current: ServerState, alive: bool, verdict: str, said: str) -> None:
    outcome = decide(current, supervisor_alive=alive, now=110.0)
    assert outcome.verdict == verdict
    assert re.search(said, outcome.message)


def waited(
    *states: tuple[ServerState, bool], timeout: float = 5.0
) -> tuple[ServerState, list[str]]:
    script: Iterator[tuple[ServerState, bool]] = iter(states)
    last = states[-1]
    lines: list[str] = []

    def fail(current: ServerState, message: str) -> ServerError:
        return start_error(current, message, "/log", "tail")

    found = wait_until_ready(
        lambda: next(script, last), timeout=timeout, report=lines.append, fail=fail
    )
    return found, lines


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "POLL_S", 0.01)


def test_each_stage_is_reported_once() -> None:
    found, lines = waited(
        (seen(state.LOADING, stage="import"), True),
        (seen(state.LOADING, stage="import"), True),
        (seen(state.LOADING, stage="load weights"), True),
        (seen(state.READY, base_url="http://h:1"), True),
    )
    assert found.state == state.READY
    assert [line.partition(":")[0] for line in lines[:-1]] == ["import", "load weights"]
    assert "is ready at http://h:1" in lines[-1]


def test_a_failure_is_an_error_with_all_that_is_known() -> None:
    failed = seen(
        state.FAILED, stage="compile", exit_status=3, message="it ended", settled=True, ended_at=1.0
    )
    with pytest.raises(
        StartFailed, match=r"it ended[\s\S]*Exit status: 3, stage: compile"
    ) as caught:
        waited((failed, True))
    assert (caught.value.exit_status, caught.value.stage, caught.value.log_path) == (
        3,
        "compile",
        "/log",
    )


def test_waiting_ends_after_its_timeout_by_the_monotonic_clock() -> None:
    with pytest.raises(StartFailed, match=r"not ready after 0\.05 s"):
        waited((seen(state.LOADING, stage="import"), True), timeout=0.05)


def test_no_gpu_is_an_error_of_its_own() -> None:
    with pytest.raises(NoFreeGpu, match="none is free"):
        waited((seen(state.FAILED, reason="no_gpu", message="none is free", settled=True), False))


@pytest.mark.parametrize("what", [state.STOPPED, state.DRAINING])
def test_a_start_that_somebody_stopped_is_not_tried_again(what: str) -> None:
    with pytest.raises(ServerLost, match="superseded") as caught:
        waited((seen(what, message="superseded by a newer start", settled=True), True))
    assert not isinstance(caught.value, StartFailed)
