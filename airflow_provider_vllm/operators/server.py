"""`with vllm_server(spec) as server:` wires the setup and teardown of a server around the tasks in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow_provider_vllm.exceptions import InvalidInput
from airflow_provider_vllm.operators.start import StartVllmServerOperator
from airflow_provider_vllm.operators.stop import StopVllmServerOperator
from airflow_provider_vllm.spec import ServerSpec

if TYPE_CHECKING:
    from airflow.sdk import XComArg


@contextmanager
def vllm_server(
    spec: ServerSpec | Mapping[str, Any],
    *,
    name: str = "vllm_server",
    queue: str | None = None,
    stop_args: Mapping[str, Any] | None = None,
    **start_args: Any,
) -> Iterator[XComArg]:
    """A server for the tasks made inside the block; yields its handle for `VllmBatchOperator(server=...)`.

    :param name: the tasks are called `start_{name}` and `stop_{name}`.
    :param queue: the queue of both tasks, and what the tasks inside should use too.
    :param stop_args: arguments of the StopVllmServerOperator; further ones go to StartVllmServerOperator.
        `on_failure_fail_dagrun=True` fails the run when the stop fails: a failed teardown leaves it green.

    Every task made inside runs after the start and before the stop, those of mapped tasks and task groups
    too; tasks made before the block are left as they are.
    """
    common: dict[str, Any] = {} if queue is None else {"queue": queue}
    further = dict(stop_args or {})
    for arguments in (start_args, further):
        if given := {"task_id", "server"} & set(arguments):
            raise InvalidInput(
                f"vllm_server() sets {', '.join(sorted(given))} itself: name the tasks by its argument name."
            )
    fail_run = further.pop("on_failure_fail_dagrun", None)
    start = StartVllmServerOperator(task_id=f"start_{name}", spec=spec, **common, **start_args)
    dag = start.get_dag()
    if dag is None:
        raise InvalidInput(
            "vllm_server() is used outside of a DAG: put it into a function with @dag, or into `with DAG(...):`."
        )
    stop = StopVllmServerOperator(
        task_id=f"stop_{name}", server=start.output, **common, **further
    ).as_teardown(setups=start, on_failure_fail_dagrun=fail_run)
    before = set(dag.task_ids)
    yield start.output
    inside = {task_id: dag.task_dict[task_id] for task_id in dag.task_ids if task_id not in before}
    for task in inside.values():
        if not task.upstream_task_ids & set(inside):
            start >> task
        if not task.downstream_task_ids & set(inside):
            task >> stop
