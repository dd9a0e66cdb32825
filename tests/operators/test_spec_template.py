"""A spec is templated as a dict, and no value of its `env` is in what Airflow stores or shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup, task

from airflow_provider_vllm import ServerSpec, StartVllmServerOperator, VllmBatchOperator
from airflow_provider_vllm.exceptions import InvalidSpec
from tests.airflow_unit import shown, stored

SECRET = "s3cret-value"


def rendered(spec: Any, *, native: bool = False, **context: Any) -> ServerSpec:
    with DAG("d", schedule=None, render_template_as_native_obj=native):
        operator = StartVllmServerOperator(task_id="start", spec=spec)
    operator.render_template_fields(context)  # type: ignore[arg-type]
    return operator.spec.build()


def test_values_of_the_dict_are_rendered_at_any_depth() -> None:
    spec = rendered(
        {
            "model": "/models/{{ ds }}",
            "engine_args": {"seed": 1, "days": ["{{ ds }}"], "extra": {"day": "{{ ds }}"}},
            "env": {"DAY": "{{ ds }}"},
            "command": ["serve", "--port", "{port}", "{{ ds }}"],
        },
        ds="2026-01-02",
    )
    assert spec.model == "/models/2026-01-02"
    assert spec.engine_args["extra"] == {"day": "2026-01-02"}
    assert spec.engine_args["days"] == ["2026-01-02"]
    assert spec.env == {"DAY": "2026-01-02"}
    assert spec.command == ("serve", "--port", "{port}", "2026-01-02")


def test_a_server_spec_is_taken_as_it_is() -> None:
    spec = ServerSpec(model="m", engine_args={"seed": 3}, env={"A": "b"}, gpus=0)
    assert rendered(spec) == spec


def test_the_whole_spec_as_one_template_of_a_native_environment() -> None:
    spec = rendered("{{ given }}", native=True, given={"model": "m", "startup_timeout": 5})
    assert (spec.model, spec.startup_timeout) == ("m", 5)


def test_a_template_that_renders_to_nonsense_is_an_error_of_the_spec() -> None:
    with pytest.raises(InvalidSpec, match="model"):
        rendered({"model": "{{ nothing }}"}, nothing="")
    with pytest.raises(InvalidSpec, match="spec is a str: give a ServerSpec or a dict"):
        rendered("{{ given }}", given={"model": "m"})


def test_an_output_of_another_task_in_the_dict_becomes_upstream() -> None:
    @task
    def choose() -> str:
        return "m"

    with DAG("d", schedule=None):
        operator = StartVllmServerOperator(task_id="start", spec={"model": choose()})
        batch = VllmBatchOperator(task_id="ask", spec={"model": choose()}, prompts=["x"])
    assert operator.upstream_task_ids == {"choose"}
    assert batch.upstream_task_ids == {"choose__1"}


@pytest.mark.parametrize("as_dict", [False, True], ids=["ServerSpec", "dict"])
@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "mapped"])
def test_env_is_masked_in_the_stored_dag(as_dict: bool, mapped: bool) -> None:
    fields = {"model": "m", "env": {"SOME_TOKEN": SECRET, "PLAIN": "also-hidden"}}
    spec: Any = fields if as_dict else ServerSpec(**fields)  # type: ignore[arg-type]
    with DAG("d", schedule=None) as dag:
        if mapped:
            VllmBatchOperator.partial(task_id="ask", spec=spec).expand(prompts=[["x"]])
        else:
            StartVllmServerOperator(task_id="start", spec=spec)
            VllmBatchOperator(task_id="ask", spec=spec, prompts=["x"])
    text = stored(dag)
    assert SECRET not in text
    assert "also-hidden" not in text
    if as_dict or not mapped:  # else Airflow keeps the text form of the ServerSpec, without env
        assert "SOME_TOKEN" in text


SPEC: dict[str, Any] = {"model": "m", "env": {"SOME_TOKEN": SECRET, "PLAIN": "also-hidden"}}


def expanded() -> Any:
    partial = VllmBatchOperator.partial(task_id="ask", prompts=["x"])
    return partial.expand(spec=[SPEC, ServerSpec(**SPEC)])


def expanded_kwargs() -> Any:
    return VllmBatchOperator.partial(task_id="ask").expand_kwargs(
        [{"spec": SPEC, "prompts": ["x"]}]
    )


def plain() -> Any:
    return VllmBatchOperator(task_id="ask", prompts=["x"])


def mapped() -> Any:
    return VllmBatchOperator.partial(task_id="ask").expand(prompts=[["x"]])


@pytest.mark.parametrize(
    ("make", "dag_defaults", "group_defaults"),
    [
        (expanded, {}, {}),
        (expanded_kwargs, {}, {}),
        (plain, {"spec": SPEC}, {}),
        (plain, {}, {"spec": SPEC}),
        (mapped, {"spec": SPEC}, {}),
        (mapped, {}, {"spec": SPEC}),
    ],
    ids=["expand", "expand_kwargs", "DAG", "task group", "mapped, DAG", "mapped, task group"],
)
def test_env_is_masked_wherever_the_spec_stands(
    make: Any, dag_defaults: dict[str, Any], group_defaults: dict[str, Any]
) -> None:
    """Among the arguments that a task is mapped over, or in `default_args`."""
    with (
        DAG("d", schedule=None, default_args=dag_defaults) as dag,
        TaskGroup("group", default_args=group_defaults),  # type: ignore[arg-type]
    ):
        task: Any = make()
    text = stored(dag)
    assert SECRET not in text
    assert "also-hidden" not in text
    if make is not plain:
        first = {expanded: lambda: {"spec": task.expand_input.value["spec"][0]}}
        first |= {expanded_kwargs: lambda: task.expand_input.value[0]}
        task = task.unmap(first.get(make, lambda: {"prompts": ["x"]})())
    assert task.spec.build().env == SPEC["env"]
    assert SPEC["env"] == {"SOME_TOKEN": SECRET, "PLAIN": "also-hidden"}


def test_an_output_of_another_task_in_the_env_of_a_mapped_one_stays_upstream() -> None:
    @task
    def choose() -> str:
        return "m"

    with DAG("d", schedule=None):
        spec = {"model": "m", "env": {"CHOSEN": choose(), "SOME_TOKEN": SECRET}}
        mapped = VllmBatchOperator.partial(task_id="ask", spec=spec).expand(prompts=[["x"]])
    assert mapped.upstream_task_ids == {"choose"}


def test_a_mapped_task_gets_its_env_all_the_same() -> None:
    spec = {"model": "m", "env": {"SOME_TOKEN": SECRET}}
    with DAG("d", schedule=None):
        mapped = VllmBatchOperator.partial(task_id="ask", spec=spec).expand(prompts=[["x"], ["y"]])
    task: Any = mapped.unmap({"prompts": ["x"]})
    assert task.spec.build().env == {"SOME_TOKEN": SECRET}


def test_env_is_masked_in_the_rendered_fields() -> None:
    spec = {"model": "/models/{{ ds }}", "env": {"SOME_TOKEN": SECRET, "DAY": "{{ ds }}"}}
    operator = StartVllmServerOperator(task_id="start", spec=spec)
    operator.render_template_fields({"ds": "2026-01-02"})
    text = json.dumps(shown(operator))
    assert "/models/2026-01-02" in text
    assert "SOME_TOKEN" in text
    assert SECRET not in text
