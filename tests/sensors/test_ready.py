"""VllmServerReadySensor: a poke at a server that loads, is ready, has failed, is gone or is somebody else's."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_provider_vllm import StartVllmServerOperator, VllmServerReadySensor
from airflow_provider_vllm.exceptions import (
    InvalidInput,
    ServerLost,
    ServerUnreachable,
    StartFailed,
)
from airflow_provider_vllm.server.state import StateRoot
from airflow_provider_vllm.server.stop import stop_server
from scripts.airflow_config import free_port
from tests.airflow_unit import context_of
from tests.fakes.endpoint import Behaviour, ThreadedEndpoint
from tests.server.conftest import fake_spec, wait_for


def launched(plan: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The handle of a server that has just been started."""
    spec = fake_spec(plan, **fields)
    task = StartVllmServerOperator(task_id="start", spec=spec, wait_for_ready=False)
    return task.execute(context_of())


def sensor(handle: Any = None, **arguments: Any) -> VllmServerReadySensor:
    return VllmServerReadySensor(task_id="wait", server=handle, **arguments)


def test_it_waits_while_the_server_loads_and_completes_the_handle(root: StateRoot) -> None:
    handle = launched({"start_s": 1.5})
    assert sensor(handle).poke(context_of()) is False
    wait_for(lambda: root.every_generation()[0].read().state == "ready")  # type: ignore[union-attr]
    done: Any = sensor(handle).poke(context_of())
    assert done.is_done
    state = root.every_generation()[0].read()
    assert state
    assert done.xcom_value == {**handle, "base_url": state.base_url}


def test_it_fails_at_once_with_the_diagnosis(root: StateRoot) -> None:
    handle = launched({"fail_at": "warm up", "fail_line": "ValueError: no such thing"})
    context = context_of()
    began = time.monotonic()
    with pytest.raises(StartFailed, match="ValueError: no such thing"):
        sensor(handle, poke_interval=0.2, timeout=600).execute(context)
    assert time.monotonic() - began < 30
    assert context["ti"].xcoms["diagnosis"]["verdict"] == "failed"


def test_it_fails_at_once_when_the_server_was_stopped(root: StateRoot) -> None:
    handle = launched()
    stop_server(root, handle["server_id"], "test")
    with pytest.raises(ServerLost, match=r"stopped as asked.*clear the task to start it again"):
        sensor(handle).poke(context_of())


def test_it_fails_at_once_when_the_supervisor_was_killed(root: StateRoot) -> None:
    handle = launched({"never_ready": True})
    state = root.every_generation()[0].read()
    assert state
    assert state.supervisor
    state.supervisor.signal(9)
    wait_for(lambda: not state.supervisor.alive)  # type: ignore[union-attr]
    with pytest.raises(StartFailed, match="the supervisor of the server is gone"):
        sensor(handle).poke(context_of())


def test_a_directory_that_was_removed(root: StateRoot) -> None:
    handle = launched()
    stop_server(root, handle["server_id"], "test")
    shutil.rmtree(root.server_dir(handle["server_id"]))
    with pytest.raises(ServerUnreachable, match=r"is gone from this worker\. Clear the start task"):
        sensor(handle).poke(context_of())


def test_each_poke_renews_the_lease(root: StateRoot) -> None:
    handle = launched({}, idle_timeout=2)
    wait_for(lambda: root.every_generation()[0].read().state == "ready")  # type: ignore[union-attr]
    for _ in range(8):
        time.sleep(0.5)
        done: Any = sensor(handle).poke(context_of())
        assert done.is_done
    wait_for(lambda: root.every_generation()[0].read().reason == "idle")  # type: ignore[union-attr]


def test_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    connection = {"conn_type": "vllm", "host": "127.0.0.1", "port": port}
    monkeypatch.setenv("AIRFLOW_CONN_SOME", json.dumps(connection))
    waiting = VllmServerReadySensor(task_id="wait", vllm_conn_id="some")
    assert waiting.poke(context_of()) is False
    with ThreadedEndpoint(Behaviour(health=503), port=port):
        assert waiting.poke(context_of()) is False
    with ThreadedEndpoint(port=port):
        assert waiting.poke(context_of()) is True


def waiting_for(monkeypatch: pytest.MonkeyPatch, **connection: Any) -> VllmServerReadySensor:
    monkeypatch.setenv("AIRFLOW_CONN_SOME", json.dumps({"conn_type": "vllm", **connection}))
    return VllmServerReadySensor(task_id="wait", vllm_conn_id="some", poke_interval=60)


def test_a_connection_that_does_not_exist_fails_at_once() -> None:
    waiting = VllmServerReadySensor(task_id="wait", vllm_conn_id="no_such_connection")
    with pytest.raises(AirflowNotFoundException, match="no_such_connection"):
        waiting.execute(context_of())


@pytest.mark.parametrize(
    ("connection", "reason"),
    [
        ({}, "has no host"),
        ({"host": "gpu", "extra": {"timeout": "soon"}}, "extra `timeout` is 'soon'"),
        ({"host": "gpu", "extra": [1]}, "extra has to be a JSON object"),
        ({"host": "gpu", "password": "a\nb"}, "no HTTP header carries"),
    ],
)
def test_a_connection_that_says_too_little_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, connection: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        waiting_for(monkeypatch, **connection).execute(context_of())


def test_a_key_that_is_refused_fails_at_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ThreadedEndpoint(Behaviour(api_key="k3y")) as server:
        at = {"host": "127.0.0.1", "port": server.port}
        for wrong in ({}, {"password": "s3cret-guess"}):
            with pytest.raises(InvalidInput, match=r"refuses the key \(HTTP 401\)") as caught:
                waiting_for(monkeypatch, **at, **wrong).execute(context_of())
            assert "s3cret-guess" not in str(caught.value)
        # What may change by itself is waited for.
        assert (
            waiting_for(monkeypatch, **at, password="k3y", extra={"model": "later"}).poke({})
            is False
        )
        assert waiting_for(monkeypatch, **at, password="k3y").poke(context_of()) is True


@pytest.mark.parametrize(("mode", "seconds"), [("poke", 5), ("reschedule", 30)])
def test_how_often_it_looks(mode: str, seconds: float) -> None:
    assert sensor({}, mode=mode).poke_interval == seconds
    assert sensor({}, mode=mode, poke_interval=7).poke_interval == 7
