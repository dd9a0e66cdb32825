"""VllmBatchOperator on a fake vLLM behind the real supervisor, without a scheduler."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRescheduleException

from airflow_provider_vllm import (
    StartVllmServerOperator,
    StopVllmServerOperator,
    VllmBatchOperator,
)
from airflow_provider_vllm.exceptions import BatchFailed, InvalidPrompts, NoFreeGpu, StartFailed
from airflow_provider_vllm.server import links
from airflow_provider_vllm.server.links import LEASE_AFTER_RESTART_S
from airflow_provider_vllm.server.state import READY, StateRoot
from airflow_provider_vllm.server.stop import stop_server
from tests.airflow_unit import FakeTaskInstance, context_of
from tests.fakes.endpoint import Behaviour, ThreadedEndpoint
from tests.server.conftest import fake_spec

PROMPTS = ["first", "second", "third"]


def ask(context: Any, **arguments: Any) -> Any:
    return VllmBatchOperator(task_id="ask", **arguments).execute(context)


def settled(root: StateRoot) -> bool:
    return all(d.read().settled for d in root.every_generation())  # type: ignore[union-attr]


@pytest.fixture
def shared(root: StateRoot) -> dict[str, Any]:
    """The handle of a running server."""
    ti = FakeTaskInstance(task_id="start")
    return StartVllmServerOperator(task_id="start", spec=fake_spec()).execute(context_of(ti))


def test_its_own_server_is_gone_when_the_answers_are_there(root: StateRoot) -> None:
    context = context_of()
    answers = ask(context, spec=fake_spec(), prompts=PROMPTS)
    assert [answer.partition(" to ")[2] for answer in answers] == [f"user: {p}" for p in PROMPTS]
    assert context["ti"].xcoms["manifest"]["rows"] == 3
    assert len(root.every_generation()) == 1
    assert settled(root)


def test_a_shared_server_stays_until_it_is_stopped(root: StateRoot, shared: Any) -> None:
    assert len(ask(context_of(), server=shared, prompts=PROMPTS)) == 3
    state = root.every_generation()[0].read()
    assert state
    assert state.state == READY
    stop = StopVllmServerOperator(task_id="stop", server=shared)
    stop.execute(context_of())
    assert settled(root)
    stop.execute(context_of())  # twice is fine


def test_a_connection_of_somebody_elses_server(
    root: StateRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadedEndpoint(Behaviour(api_key="k3y")) as server:
        monkeypatch.setenv("AIRFLOW_CONN_SOME", connection(server.port, password="k3y"))
        answers = ask(context_of(), vllm_conn_id="some", prompts=PROMPTS)
    assert len(answers) == 3
    assert root.every_generation() == []


def connection(port: int, **more: Any) -> str:
    return json.dumps({"conn_type": "vllm", "host": "127.0.0.1", "port": port, **more})


def test_a_line_that_is_not_json_is_named_and_the_others_are_answered(
    root: StateRoot, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": f"row {number}"}) for number in range(1, 21)]
    lines[6] = '{"prompt": "row 7"'
    source.write_text("\n".join(lines) + "\n")
    manifest = ask(context_of(), spec=fake_spec(), input_path=str(source), output_path=str(output))
    assert (manifest["rows"], manifest["ok"], manifest["errors"]) == (20, 19, 1)
    assert manifest["output_path"] == str(output)
    (error,) = [json.loads(line) for line in Path(manifest["errors_path"]).read_text().splitlines()]
    assert f"{source}" in json.dumps(error)
    assert "line 7" in json.dumps(error)
    answered = [json.loads(line) for line in output.read_text().splitlines()]
    assert sum("row" in json.dumps(each["response"]) for each in answered if each["response"]) == 19


def test_the_errors_of_a_list_are_in_xcom(root: StateRoot) -> None:
    """The answers say None there, and nothing more."""
    context = context_of()
    more = {"batch": {"max_error_rate": 1, "output_schema": {"type": "object"}}}
    prompts = ["[[say {}]]", "[[status 400]]", "[[say no object]]"]
    assert ask(context, spec=fake_spec(), prompts=prompts, **more) == ["{}", None, None]
    refused, invalid = context["ti"].xcoms["errors"]
    assert (refused["row"], refused["code"], refused["line"]) == (1, "http_400", 2)
    assert (invalid["row"], invalid["code"], invalid["text"]) == (2, "invalid_output", "no object")
    ask(fine := context_of(), spec=fake_spec(), prompts=PROMPTS)
    assert "errors" not in fine["ti"].xcoms


def test_the_errors_of_a_list_that_fails_are_in_xcom_too(root: StateRoot) -> None:
    context = context_of()
    with pytest.raises(BatchFailed):
        ask(context, spec=fake_spec(), prompts=["[[status 400]]", "fine"])
    (error,) = context["ti"].xcoms["errors"]
    assert (error["row"], error["code"]) == (0, "http_400")


def test_outlets_carry_the_manifest(root: StateRoot) -> None:
    from airflow.sdk import Asset

    answers, context = Asset("answers"), context_of()
    outlets = [answers, "something of a plugin's"]
    ask(context, spec=fake_spec(), prompts=PROMPTS, outlets=outlets)
    assert context["outlet_events"][answers].extra["manifest"]["ok"] == 3


def test_a_failed_batch_leaves_its_manifest_and_no_server(root: StateRoot) -> None:
    context = context_of()
    with pytest.raises(BatchFailed, match="told to answer 400"):
        ask(context, spec=fake_spec(), prompts=[*PROMPTS, "[[status 400]]"])
    assert context["ti"].xcoms["manifest"]["errors"] == 1
    assert settled(root)


def test_a_failed_start_leaves_its_diagnosis_and_no_server(root: StateRoot) -> None:
    context = context_of()
    with pytest.raises(StartFailed, match="Exit status: 1, stage: load weights"):
        ask(context, spec=fake_spec({"fail_at": "load weights"}), prompts=PROMPTS)
    assert context["ti"].xcoms["diagnosis"]["verdict"] == "failed"
    assert settled(root)


def test_a_server_lost_too_often_leaves_the_diagnosis_of_the_server(root: StateRoot) -> None:
    context = context_of()
    with pytest.raises(BatchFailed, match="restarted as often as server_restarts allows"):
        ask(context, spec=fake_spec(), prompts=["[[die]]"], server_restarts=0)
    assert context["ti"].xcoms["diagnosis"]["group"] == "dead_process"
    assert settled(root)


@pytest.mark.parametrize("own", [True, False], ids=["own server", "shared server"])
def test_a_gpu_that_is_gone_in_mid_batch_is_waited_for_with_the_rows_kept(
    root: StateRoot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: bool
) -> None:
    """Another one has taken it before the lost server was started again."""

    def taken(*args: Any, **kwargs: Any) -> Any:
        raise NoFreeGpu("1 GPU(s) asked for, 0 free")

    ti, spec = FakeTaskInstance(), fake_spec()
    given: dict[str, Any] = {"spec": spec}
    if not own:
        start = StartVllmServerOperator(task_id="start", spec=spec)
        given = {"server": start.execute(context_of(FakeTaskInstance(task_id="start")))}
    given |= {
        "prompts": [*PROMPTS, "[[die 1]]"],
        "output_path": str(tmp_path / "out.jsonl"),
        "batch": {"concurrency": 1, "pack": 1},
    }
    really = links.start
    launched: list[int] = []

    def start_once(*args: Any, **kwargs: Any) -> Any:
        launched.append(1)
        return really(*args, **kwargs) if own and len(launched) == 1 else taken()

    with monkeypatch.context() as patch:
        patch.setattr(links, "start", start_once)
        with pytest.raises(AirflowRescheduleException):
            ask(context_of(ti), **given)
    assert ti.store["gpu_wait"]["try"] == 1
    given["prompts"][-1] = "the last"
    manifest = ask(context_of(ti), **{**given, "batch": {}})
    assert (manifest["rows"], manifest["reused"]) == (4, 3)


def test_a_server_started_again_from_the_handle_gets_a_short_lease(
    root: StateRoot, shared: Any
) -> None:
    stop_server(root, shared["server_id"], "test")
    assert len(ask(context_of(), server=shared, prompts=PROMPTS)) == 3
    assert [d.read().state for d in root.every_generation()] == ["stopped", READY]  # type: ignore[union-attr]
    left = lease_left(root, shared)
    assert LEASE_AFTER_RESTART_S - 10 < left < LEASE_AFTER_RESTART_S + 1


def test_a_shorter_lease_than_that_stays_as_it_is(root: StateRoot) -> None:
    spec = fake_spec(idle_timeout=30)
    handle = StartVllmServerOperator(task_id="start", spec=spec).execute(context_of())
    stop_server(root, handle["server_id"], "test")
    ask(context_of(), server=handle, prompts=PROMPTS)
    assert 20 < lease_left(root, handle) < 31


def lease_left(root: StateRoot, handle: dict[str, Any]) -> float:
    """Seconds until the newest start of a server ends itself, as its supervisor says."""
    from airflow_provider_vllm.server.control import ControlClient, token_for

    directory = root.newest(handle["server_id"])
    assert directory
    state = directory.read()
    assert state
    client = ControlClient(state.control_url or "", token_for(directory.key() or "", state.nonce))
    return client.status()["lease_until"] - time.time()


def test_a_secret_in_env_is_not_in_the_handle_and_reaches_the_server_started_again(
    root: StateRoot,
) -> None:
    spec = fake_spec(env={"SOME_TOKEN": "s3cret", "PLAIN": "x"})
    handle = StartVllmServerOperator(task_id="start", spec=spec).execute(context_of())
    assert handle["spec"]["env"] == {"SOME_TOKEN": "***", "PLAIN": "x"}
    stop_server(root, handle["server_id"], "test")
    ask(context_of(), server=handle, prompts=PROMPTS)
    newest = root.newest(handle["server_id"])
    assert newest
    state = newest.read()
    assert state
    assert state.engine
    environ = Path(f"/proc/{state.engine.pid}/environ").read_bytes().split(b"\0")
    assert b"SOME_TOKEN=s3cret" in environ


def test_a_finished_batch_that_is_cleared_starts_no_server(
    root: StateRoot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(20)))
    arguments = {
        "spec": fake_spec(),
        "input_path": str(source),
        "output_path": str(tmp_path / "out.jsonl"),
    }
    first = ask(context_of(), **arguments)
    assert len(root.every_generation()) == 1
    written = (tmp_path / "out.jsonl").read_bytes()
    again = ask(context_of(FakeTaskInstance(try_number=2)), **arguments)
    assert len(root.every_generation()) == 1, "no server was started"
    assert {name: again[name] for name in ("rows", "ok", "errors", "outcomes")} == {
        name: first[name] for name in ("rows", "ok", "errors", "outcomes")
    }
    assert again["reused"] == 20
    assert (tmp_path / "out.jsonl").read_bytes() == written


def test_nor_does_it_start_one_again_that_another_task_started(
    root: StateRoot, shared: Any, tmp_path: Path
) -> None:
    arguments = {"server": shared, "prompts": PROMPTS, "output_path": str(tmp_path / "out.jsonl")}
    ask(context_of(), **arguments)
    stop_server(root, shared["server_id"], "test")
    assert ask(context_of(), **arguments)["reused"] == 3
    assert [d.read().state for d in root.every_generation()] == ["stopped"]  # type: ignore[union-attr]


def test_tasks_mapped_over_models_do_not_share_an_output(root: StateRoot, tmp_path: Path) -> None:
    """The second one is refused before its server is started."""
    arguments = {"prompts": PROMPTS, "output_path": str(tmp_path / "out.jsonl")}
    ask(context_of(FakeTaskInstance(map_index=0)), spec=fake_spec(), **arguments)
    written = (tmp_path / "out.jsonl").read_bytes()
    other = fake_spec(served_model_name="other")
    with pytest.raises(InvalidPrompts, match=r"also that of .* in this run"):
        ask(context_of(FakeTaskInstance(map_index=1)), spec=other, **arguments)
    assert len(root.every_generation()) == 1
    assert (tmp_path / "out.jsonl").read_bytes() == written
