"""What bad input gets: an error that names it, before anything is started."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm import (
    ServerSpec,
    StartVllmServerOperator,
    StopVllmServerOperator,
    VllmBatchOperator,
    VllmServerReadySensor,
)
from airflow_provider_vllm.diagnosis.rule import Diagnosis
from airflow_provider_vllm.exceptions import (
    InvalidHandle,
    InvalidInput,
    InvalidPrompts,
    InvalidSpec,
    PreflightFailed,
)
from airflow_provider_vllm.server.state import StateRoot
from tests.airflow_unit import FakeTaskInstance, context_of
from tests.fakes.endpoint import ThreadedEndpoint
from tests.server.conftest import fake_spec

pytestmark = pytest.mark.usefixtures("nothing_started")


def start(spec: ServerSpec | Mapping[str, Any]) -> Any:
    return StartVllmServerOperator(task_id="start", spec=spec).execute(context_of())


def batch(**arguments: Any) -> Any:
    arguments = {"spec": fake_spec(), **arguments}
    return VllmBatchOperator(task_id="ask", **arguments).execute(context_of())


# -- the server --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"),
    [({1, 2}, "a set"), (object(), "an object"), (b"4096", "a bytes"), ([[1]], "a list")],
)
def test_an_engine_argument_of_an_unknown_type(value: Any, kind: str) -> None:
    with pytest.raises(InvalidSpec, match=rf"engine_args\['max_model_len'\] is {kind}: give a"):
        start({"model": "tiny", "engine_args": {"max_model_len": value}})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("api_key", "auth_conn_id"),
        ("api-key", "auth_conn_id"),
        ("port", "the field port"),
        ("host", "the field host"),
        ("served_model_name", "the field served_model_name"),
        ("served-model", "the field served_model_name"),  # argparse takes it for the whole option
        ("disable_log_stats", "the provider reads vLLM's counters"),
        ("no_disable_log_stats", "the provider reads vLLM's counters"),
    ],
)
def test_an_engine_argument_that_the_provider_owns(name: str, instead: str) -> None:
    with pytest.raises(InvalidSpec, match=rf"engine_args\['{name}'\] is set by .*{instead}"):
        start({"model": "tiny", "engine_args": {name: "x"}})


def test_a_field_that_does_not_exist_is_refused_when_the_dag_is_read() -> None:
    with pytest.raises(InvalidSpec, match=r"has no field 'max_model_len'.*goes into engine_args"):
        StartVllmServerOperator(task_id="start", spec={"model": "tiny", "max_model_len": 4096})


def test_neither_source_of_a_server() -> None:
    with pytest.raises(InvalidInput, match="'ask': no server given: give exactly one of spec"):
        VllmBatchOperator(task_id="ask", prompts=["x"])


def test_two_sources_of_a_server() -> None:
    with pytest.raises(InvalidInput, match="'ask': spec and vllm_conn_id given: give exactly one"):
        VllmBatchOperator(task_id="ask", spec=fake_spec(), vllm_conn_id="c", prompts=["x"])


@pytest.mark.parametrize("arguments", [{}, {"server": {}, "vllm_conn_id": "c"}])
def test_both_or_none_of_a_sensors_servers(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="'wait': give exactly one of server and vllm_conn_id"):
        VllmServerReadySensor(task_id="wait", **arguments)


def test_an_interpreter_without_vllm() -> None:
    with pytest.raises(InvalidSpec, match=rf"{sys.executable} .* has no vLLM.*\[vllm\] python"):
        start({"model": "/tmp", "python": sys.executable, "gpus": 0})


def test_an_interpreter_that_does_not_exist() -> None:
    with pytest.raises(InvalidSpec, match="/no/such/python"):
        start({"model": "/tmp", "python": "/no/such/python", "gpus": 0})


def test_a_model_path_that_does_not_exist(vllm_python: Path) -> None:
    spec = {"model": "/no/such/model", "python": str(vllm_python), "gpus": 0}
    with pytest.raises(PreflightFailed, match="/no/such/model"):
        start(spec)
    with pytest.raises(PreflightFailed, match="/no/such/model"):
        batch(spec=spec, prompts=["x"])
    for task in (
        StartVllmServerOperator(task_id="start", spec=spec),
        VllmBatchOperator(task_id="ask", spec=spec, prompts=["x"]),
    ):
        context = context_of()
        with pytest.raises(PreflightFailed):
            task.execute(context)
        found = Diagnosis.from_json(context["ti"].xcoms["diagnosis"])
        assert (found.verdict, found.group) == ("failed", "model_config")
        assert found.cause == "preflight_model_path"
        assert "/no/such/model" in found.explanation
        assert found.retry_launch is False


@pytest.mark.parametrize("where", ["the task", "the configuration", "the pod"])
def test_kubernetes_executor_with_a_shared_server(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = None
    if where == "the task":
        executor = "KubernetesExecutor"
    elif where == "the configuration":
        monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "KubernetesExecutor")
    else:
        monkeypatch.setenv("AIRFLOW_IS_K8S_EXECUTOR_POD", "1")
    task = StartVllmServerOperator(task_id="start", spec=fake_spec(), executor=executor)
    with pytest.raises(
        InvalidInput, match=r"would die with the start task's pod.*VllmBatchOperator"
    ):
        task.execute(context_of())


# -- the handle --------------------------------------------------------------------------------


def handle(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "vllm_server",
        "server_id": "some-dag-start",
        "generation": 1,
        "nonce": "0123456789abcdef",
        "host": "gpu-host-7",
        "base_url": "http://127.0.0.1:8000",
        "control_url": "http://127.0.0.1:8001",
        "model": "tiny",
        "spec": fake_spec().public(),
        **changes,
    }


def test_a_handle_of_another_host_whose_server_is_bound_to_loopback() -> None:
    said = "listens on 127.0.0.1 of host 'gpu-host-7'.*queue that only 'gpu-host-7' serves.*auth_conn_id"
    with pytest.raises(InvalidHandle, match=said):
        VllmBatchOperator(task_id="ask", server=handle(), prompts=["x"]).execute(context_of())
    with pytest.raises(InvalidHandle, match=said):
        StopVllmServerOperator(task_id="stop", server=handle()).execute(context_of())
    with pytest.raises(InvalidHandle, match=said):
        VllmServerReadySensor(task_id="wait", server=handle()).execute(context_of())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "`server` is a NoneType that is no server handle.*start.output"),
        ("http://host:8000", "`server` is a str that is no server handle"),
        (handle(server_id="../../etc"), "is no server id"),
        (handle(nonce="0123"), "nonce is '0123': run the start task again"),
        ({"kind": "vllm_server", "host": "h"}, "has no base_url, control_url, generation"),
        (handle(spec={"model": ""}), "spec is wrong: ServerSpec.model is ''"),
    ],
)
def test_what_is_no_handle(value: Any, said: str) -> None:
    task = VllmBatchOperator(task_id="ask", server={}, prompts=["x"])
    task.server = value  # as the output of another task is rendered
    with pytest.raises(InvalidHandle, match=said):
        task.execute(context_of())


def test_nothing_to_stop_where_no_server_was_started() -> None:
    StopVllmServerOperator(task_id="stop", server=None).execute(context_of())  # type: ignore[arg-type]


# -- the prompts -------------------------------------------------------------------------------


def test_prompts_that_are_not_a_list() -> None:
    with pytest.raises(InvalidPrompts, match="prompts must be a list, not str"):
        batch(prompts="What is the capital of France?")


def test_an_empty_list() -> None:
    with pytest.raises(InvalidPrompts, match="prompts is an empty list"):
        batch(prompts=[])


def test_both_or_none_of_prompts_and_input_path(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidPrompts, match="give either prompts or input_path; neither was given"
    ):
        batch()
    with pytest.raises(InvalidPrompts, match="give either prompts or input_path; both were given"):
        batch(prompts=["x"], input_path="a.jsonl", output_path="b.jsonl")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 999)[:-20])
    for name, said in {
        "missing.jsonl": "does not exist",
        "empty.jsonl": "is empty: there is nothing to do",
        "blank.jsonl": "holds no rows: there is nothing to do",
        "folder.jsonl": "is a directory",
        "empty.jsonl/below.jsonl": "cannot be read",
        "torn.jsonl.gz": "cannot be read to its end",
        "*.csv": "no file matches",
    }.items():
        path = tmp_path / name
        with pytest.raises(InvalidPrompts) as caught:
            batch(input_path=str(path), output_path=str(tmp_path / "out.jsonl"))
        assert f"input_path {path}" in str(caught.value)
        assert said in str(caught.value)


def test_an_output_path_that_belongs_to_another_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in ("one", "two"):
        (tmp_path / f"{day}.jsonl").write_text('{"prompt": "x"}\n')
    out = tmp_path / "out.jsonl"
    with ThreadedEndpoint() as server:
        connection = {"conn_type": "vllm", "host": "127.0.0.1", "port": server.port}
        monkeypatch.setenv("AIRFLOW_CONN_SOME", json.dumps(connection))
        first = tmp_path / "one.jsonl"
        batch(spec=None, vllm_conn_id="some", input_path=str(first), output_path=str(out))
    answers = out.read_bytes()
    second = str(tmp_path / "two.jsonl")
    task = VllmBatchOperator(
        task_id="ask", spec=fake_spec(), input_path=second, output_path=str(out)
    )
    with pytest.raises(InvalidPrompts) as caught:
        task.execute(context_of(FakeTaskInstance(run_id="the next day")))
    assert str(out) in str(caught.value)
    assert "name another" in str(caught.value)
    assert out.read_bytes() == answers, "it is left as it was"


@pytest.mark.parametrize("place", ["argument", "batch"])
def test_an_output_path_is_kept_wherever_it_is_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another task that asks otherwise is refused; a clear reuses the answers."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\n')
    paths = {"input_path": str(source), "output_path": str(out)}

    def ask(task_id: str, system_prompt: str) -> Any:
        more = {"system_prompt": system_prompt}
        given = {"batch": more, **paths} if place == "argument" else {"batch": {**more, **paths}}
        task = VllmBatchOperator(task_id=task_id, vllm_conn_id="some", **given)
        return task.execute(context_of(FakeTaskInstance(task_id=task_id)))

    with ThreadedEndpoint() as server:
        connection = {"conn_type": "vllm", "host": "127.0.0.1", "port": server.port}
        monkeypatch.setenv("AIRFLOW_CONN_SOME", json.dumps(connection))
        ask("one", "be kind")
        assert (tmp_path / "out.jsonl.journal" / "meta.json").exists()
        with pytest.raises(InvalidPrompts, match=r"is also that of .*one"):
            ask("two", "be rude")
        assert ask("one", "be kind")["reused"] == 1


def test_a_field_of_the_batch_that_does_not_exist() -> None:
    with pytest.raises(InvalidInput, match="batch has no field 'temperature'"):
        batch(prompts=["x"], batch={"temperature": 0})


def test_sampling_that_is_no_mapping(root: StateRoot) -> None:
    with pytest.raises(InvalidInput, match="sampling is a list: give a dict"):
        batch(prompts=["x"], sampling=["temperature"])


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"temprature": 0}, "no parameter 'temprature'.*did you mean 'temperature'"),
        ({"max_new_tokens": 5}, "did you mean 'max_tokens'"),
        ({"temperature": "hot"}, "temperature is 'hot' for every row"),
        ({"top_p": 7}, "top_p is 7 for every row"),
    ],
)
def test_sampling_that_every_row_would_suffer_from(sampling: dict[str, Any], said: str) -> None:
    """The one would be ignored without a word, the other cost the start of a server."""
    with pytest.raises(InvalidInput, match=said):
        VllmBatchOperator(task_id="ask", spec=fake_spec(), prompts=["x"], sampling=sampling)


def test_another_server_than_vllm_may_know_more_names() -> None:
    VllmBatchOperator(
        task_id="ask", vllm_conn_id="theirs", prompts=["x"], sampling={"temprature": 0}
    )
