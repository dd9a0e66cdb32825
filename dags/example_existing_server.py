"""A server that somebody else runs: wait until it answers, then send the batch.

Needs a connection of type `vllm` called `vllm_default` (host, port, and the API key as password).
"""

from __future__ import annotations

from airflow.sdk import dag

from airflow_provider_vllm import VllmBatchOperator, VllmServerReadySensor


@dag(schedule=None, catchup=False, tags=["vllm"])
def example_existing_server():
    ready = VllmServerReadySensor(
        task_id="wait_for_server", vllm_conn_id="vllm_default", mode="reschedule", timeout=1800
    )
    ask = VllmBatchOperator(
        task_id="ask",
        vllm_conn_id="vllm_default",
        prompts=["What is the capital of France?"],
        sampling={"temperature": 0, "max_tokens": 40},
    )
    ready >> ask


example_existing_server()
