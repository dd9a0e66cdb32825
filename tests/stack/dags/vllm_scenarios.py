"""One DAG for each way of using the operators; a run's conf says what server and which prompts.

conf: `spec` the fields of a ServerSpec, `prompts` a list, `batch` further fields of the batch. Whatever
a scenario of `tests/stack/test_scenarios.py` wants to go wrong stands in the fake's plan, in `spec`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import dag

from airflow_provider_vllm import VllmBatchOperator, VllmServerReadySensor, vllm_server

SPEC: Any = "{{ dag_run.conf['spec'] }}"
PROMPTS: Any = "{{ dag_run.conf['prompts'] }}"
BATCH: Any = "{{ dag_run.conf.get('batch') }}"
SETTINGS: dict[str, Any] = {
    "schedule": None,
    "catchup": False,
    "render_template_as_native_obj": True,
    # Long enough that a person, or a test that looks twice a second, sees a task wait for its retry.
    "default_args": {"retry_delay": timedelta(seconds=4)},
}


def ask(task_id: str, **arguments: Any) -> VllmBatchOperator:
    return VllmBatchOperator(task_id=task_id, prompts=PROMPTS, batch=BATCH, **arguments)


@dag(**SETTINGS)
def vllm_shared() -> None:
    with vllm_server(SPEC) as server:
        ask("work", server=server)


@dag(**SETTINGS, dagrun_timeout=timedelta(seconds=25))
def vllm_shared_run_times_out() -> None:
    with vllm_server(SPEC) as server:
        ask("work", server=server)


@dag(**SETTINGS)
def vllm_two_batches() -> None:
    with vllm_server(SPEC) as server:
        ask("one", server=server)
        ask("other", server=server)


@dag(**SETTINGS)
def vllm_own_server() -> None:
    ask("work", spec=SPEC)


@dag(**SETTINGS)
def vllm_own_server_times_out() -> None:
    ask("work", spec=SPEC, execution_timeout=timedelta(seconds=12), retries=0)


def waiting(mode: str, poke_interval: float) -> None:
    with vllm_server(SPEC, wait_for_ready=False) as server:
        ready = VllmServerReadySensor(
            task_id="ready", server=server, mode=mode, poke_interval=poke_interval, timeout=600
        )
        ask("work", server=ready.output)


@dag(**SETTINGS)
def vllm_sensor_poke() -> None:
    waiting("poke", 1)


@dag(**SETTINGS)
def vllm_sensor_reschedule() -> None:
    waiting("reschedule", 10)


vllm_shared()
vllm_shared_run_times_out()
vllm_two_batches()
vllm_own_server()
vllm_own_server_times_out()
vllm_sensor_poke()
vllm_sensor_reschedule()
