"""What the chaos test disturbs: a batch with a server of its own, and a shared one with its teardown."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import dag

from airflow_provider_vllm import ServerSpec, VllmBatchOperator, vllm_server

SERVER = ServerSpec(
    model=os.environ["CHAOS_MODEL"],
    served_model_name="tiny",
    engine_args={"enforce_eager": True, "max_model_len": 512, "dtype": "float32"},
    startup_timeout=float(os.environ["CHAOS_STARTUP_S"]),
    idle_timeout=float(os.environ["CHAOS_LEASE_S"]),
)
RETRY: dict[str, Any] = {"retries": 3, "retry_delay": timedelta(seconds=1), "retry_policy": None}
BATCH: dict[str, Any] = {
    "input_path": "{{ dag_run.conf['input'] }}",
    "output_path": "{{ dag_run.conf['output'] }}",
    "endpoint": "completions",
    "sampling": {"max_tokens": 64, "temperature": 0, "ignore_eos": True},
    "batch": {"concurrency": 8, "pack": 1, "stall_timeout": 8, "probe_timeout": 8},
    **RETRY,
}


@dag(schedule=None, catchup=False, max_active_runs=1)
def chaos_one_task():
    VllmBatchOperator(task_id="work", spec=SERVER, **BATCH)


@dag(schedule=None, catchup=False, max_active_runs=1)
def chaos_shared():
    with vllm_server(SERVER, name="server", stop_args=RETRY, **RETRY) as server:
        VllmBatchOperator(task_id="work", server=server, **BATCH)


chaos_one_task()
chaos_shared()
