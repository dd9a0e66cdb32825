"""What the worker adds to a spec: its configuration, names of servers, secrets of connections."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from airflow_provider_vllm.exceptions import InvalidSpec
from airflow_provider_vllm.server.private import private_dir
from airflow_provider_vllm.server.processes import this_process
from airflow_provider_vllm.server.state import check_server_id
from airflow_provider_vllm.spec import ServerSpec
from tests.airflow_unit import FakeTaskInstance, context_of

from airflow_provider_vllm import worker  # isort: skip - after Airflow has a home


def id_of(**fields: object) -> str:
    return worker.server_id(context_of(FakeTaskInstance(**fields)))  # type: ignore[arg-type]


def test_a_server_belongs_to_dag_run_task_and_map_index_and_not_to_a_try() -> None:
    first = id_of()
    assert id_of(try_number=7) == first
    others = {
        id_of(dag_id="other"),
        id_of(run_id="other"),
        id_of(task_id="other"),
        id_of(map_index=0),
        id_of(dag_id="some", task_id="dag_some_task"),
    }
    assert len(others | {first}) == 6


@pytest.mark.parametrize(
    "name", ["group.task", "Ünïcode-Täsk", "..", "a" * 250, "___", "x/../../etc", "schedule d"]
)
def test_any_name_of_a_task_makes_a_safe_id(name: str) -> None:
    found = id_of(dag_id=name, task_id=name, run_id=f"manual__{name}")
    assert check_server_id(found) == found


def test_the_state_root_is_below_airflow_home_unless_configured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    assert worker.state_root_path() == str(tmp_path / "vllm")
    monkeypatch.setenv("SOME_DISK", "/disk")
    monkeypatch.setenv("AIRFLOW__VLLM__STATE_ROOT", "$SOME_DISK/vllm")
    assert worker.state_root_path() == "/disk/vllm"


def test_days_that_are_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.keep_failed_days() == 7
    monkeypatch.setenv("AIRFLOW__VLLM__KEEP_FAILED_DAYS", "0.5")
    assert worker.keep_failed_days() == 0.5
    for wrong in ("a week", "-1", "nan"):
        monkeypatch.setenv("AIRFLOW__VLLM__KEEP_FAILED_DAYS", wrong)
        with pytest.raises(InvalidSpec, match=rf"\[vllm\] keep_failed_days is '{wrong}'"):
            worker.keep_failed_days()


@pytest.mark.parametrize("wrong", ["vllm", "./vllm", "$NO_SUCH_VARIABLE/vllm"])
def test_a_state_root_that_depends_on_where_a_process_is(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__VLLM__STATE_ROOT", wrong)
    with pytest.raises(InvalidSpec, match=r"\[vllm\] state_root is .*: give an absolute path"):
        worker.state_root()


def test_a_connection_that_there_is_not() -> None:
    with pytest.raises(InvalidSpec, match=r"ServerSpec\.hf_conn_id names the connection 'no_such'"):
        worker.secret("no_such", "hf_conn_id")


def test_the_label_names_dag_task_run_map_index_and_try() -> None:
    ti = FakeTaskInstance(map_index=3, try_number=2)
    assert worker.task_label(context_of(ti)) == "some_dag.some_task[3] some_run try 2"


def test_secrets_come_from_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, password in (("with_key", "k3y"), ("with_token", "t0ken"), ("without", None)):
        connection = {"conn_type": "vllm", "password": password}
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(connection))
    spec = ServerSpec(model="m", gpus=0, auth_conn_id="with_key", hf_conn_id="with_token")
    options = worker.launch_options(spec, context_of())
    assert (options.key, options.hf_token) == ("k3y", "t0ken")
    assert options.owner == this_process()
    assert "k3y" not in repr(options)
    with pytest.raises(
        InvalidSpec, match=r"hf_conn_id names the connection 'without', which has no"
    ):
        worker.launch_options(ServerSpec(model="m", gpus=0, hf_conn_id="without"), context_of())


def test_journals_of_tasks_that_never_came_back_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIRFLOW__VLLM__STATE_ROOT", str(tmp_path))
    old, fresh = tmp_path / "batches" / "old", tmp_path / "batches" / "fresh"
    private_dir(tmp_path / "batches")
    tmp_path.chmod(0o700)
    for folder in (old, fresh):
        folder.mkdir()
        (folder / "segment").write_text("answers")
    long_ago = time.time() - 8 * 86400
    for path in (old / "segment", old, fresh):
        os.utime(path, (long_ago, long_ago))

    mine = worker.journal_dir(context_of(FakeTaskInstance()))

    assert mine == str(tmp_path / "batches" / id_of())
    assert (old.exists(), fresh.exists()) == (False, True)
