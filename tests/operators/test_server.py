"""`vllm_server()`: which tasks are wired between the start and the stop."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup, task

from airflow_provider_vllm import VllmBatchOperator, vllm_server
from airflow_provider_vllm.exceptions import InvalidInput
from tests.server.conftest import fake_spec

START, STOP = "start_vllm_server", "stop_vllm_server"


def ask(task_id: str, **arguments: Any) -> VllmBatchOperator:
    return VllmBatchOperator(task_id=task_id, **{"prompts": ["x"], **arguments})


def upstream(dag: DAG, task_id: str) -> set[str]:
    return set(dag.get_task(task_id).upstream_task_ids)


def test_tasks_inside_run_between_start_and_stop() -> None:
    with DAG("d", schedule=None) as dag, vllm_server(fake_spec()) as server:
        ask("one", server=server)
        ask("two", server=server)
    assert upstream(dag, "one") == upstream(dag, "two") == {START}
    assert upstream(dag, STOP) == {START, "one", "two"}
    assert dag.get_task(START).is_setup
    assert dag.get_task(STOP).is_teardown


def test_only_the_ends_of_a_chain_are_wired() -> None:
    with DAG("d", schedule=None) as dag, vllm_server(fake_spec()) as server:
        first = ask("first", server=server)
        ask("second", server=server, prompts=first.output)
    assert upstream(dag, "second") == {"first", START}, "it reads the handle itself"
    assert upstream(dag, STOP) == {START, "second"}


def test_a_task_that_does_not_read_the_handle_still_waits_for_the_server() -> None:
    @task
    def other() -> None: ...

    with DAG("d", schedule=None) as dag, vllm_server(fake_spec()):
        other()
    assert upstream(dag, "other") == {START}
    assert upstream(dag, STOP) == {START, "other"}


def test_mapped_tasks() -> None:
    with DAG("d", schedule=None) as dag, vllm_server(fake_spec()) as server:
        VllmBatchOperator.partial(task_id="mapped", server=server).expand(prompts=[["x"], ["y"]])
    assert upstream(dag, "mapped") == {START}
    assert upstream(dag, STOP) == {START, "mapped"}


def test_task_groups_and_mapped_task_groups() -> None:
    from airflow.sdk import task_group

    with DAG("d", schedule=None) as dag, vllm_server(fake_spec()) as server:
        with TaskGroup("group"):
            ask("one", server=server) >> ask("two", server=server)

        @task_group
        def each(prompts: Any) -> None:
            ask("ask", server=server, prompts=prompts)

        each.expand(prompts=[["x"], ["y"]])
    assert upstream(dag, "group.one") == {START}
    assert upstream(dag, "each.ask") == {START}
    assert upstream(dag, STOP) == {START, "group.two", "each.ask"}


def test_tasks_made_before_or_after_the_block_are_left_alone() -> None:
    with DAG("d", schedule=None) as dag:
        before = ask("before", vllm_conn_id="c")
        with vllm_server(fake_spec()) as server:
            inside = ask("inside", server=server)
            before >> inside
        ask("after", vllm_conn_id="c")
    assert upstream(dag, "before") == upstream(dag, "after") == set()
    assert upstream(dag, STOP) == {START, "inside"}


def test_a_task_inside_that_waits_for_one_outside_waits_for_the_server_too() -> None:
    @task
    def prompts() -> list[str]:
        return ["x"]

    @task
    def read(answers: Any) -> None: ...

    with DAG("d", schedule=None) as dag:
        given = prompts()
        with vllm_server(fake_spec()) as server:
            inside = ask("inside", server=server, prompts=given)
        read(inside.output)
    assert upstream(dag, "inside") == {START, "prompts"}
    assert upstream(dag, STOP) == {START, "inside"}
    assert upstream(dag, "read") == {"inside"}, "who reads the answers need not wait for the stop"


def test_two_servers_one_inside_the_other() -> None:
    with (
        DAG("d", schedule=None) as dag,
        vllm_server(fake_spec(), name="big") as big,
        vllm_server(fake_spec(), name="small") as small,
    ):
        draft = ask("draft", server=small)
        ask("check", server=big, prompts=draft.output)
    assert upstream(dag, "start_small") == {"start_big"}
    assert upstream(dag, "draft") >= {"start_small"}
    assert upstream(dag, "check") == {"start_big", "draft"}
    assert upstream(dag, "stop_small") >= {"start_small", "check"}
    assert upstream(dag, "stop_big") >= {"start_big", "stop_small"}


def test_an_empty_block_still_stops_what_it_starts() -> None:
    with DAG("d", schedule=None) as dag, vllm_server(fake_spec()):
        pass
    assert upstream(dag, STOP) == {START}


def test_queue_and_arguments_go_where_they_belong() -> None:
    with (
        DAG("d", schedule=None) as dag,
        vllm_server(
            fake_spec(), queue="gpu", retries=4, stop_args={"on_failure_fail_dagrun": True}
        ),
    ):
        pass
    start: Any = dag.get_task(START)
    stop: Any = dag.get_task(STOP)
    assert (start.queue, stop.queue) == ("gpu", "gpu")
    assert (start.retries, stop.retries) == (4, 2)
    assert stop.on_failure_fail_dagrun


def test_in_a_task_group_the_names_carry_its_prefix() -> None:
    with DAG("d", schedule=None) as dag, TaskGroup("g"), vllm_server(fake_spec()) as server:
        ask("one", server=server)
    assert upstream(dag, "g.one") == {f"g.{START}"}
    assert upstream(dag, f"g.{STOP}") == {f"g.{START}", "g.one"}


def test_outside_of_a_dag() -> None:
    with pytest.raises(InvalidInput, match="outside of a DAG"), vllm_server(fake_spec()):
        pass


@pytest.mark.parametrize("wrong", [{"task_id": "x"}, {"stop_args": {"server": {}}}])
def test_what_it_sets_itself(wrong: dict[str, Any]) -> None:
    with (
        DAG("d", schedule=None),
        pytest.raises(InvalidInput, match=r"vllm_server\(\) sets (task_id|server) itself"),
        vllm_server(fake_spec(), **wrong),
    ):
        pass
