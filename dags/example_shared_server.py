"""One server for several tasks: setup, two batches, teardown.

It pays when loading the model takes longer than a batch. Start, batches and stop have to run on the same
worker: give them a queue that only one GPU host serves (`vllm_server(queue=...)`), or see
README about servers that other hosts reach.
"""

from __future__ import annotations

import os

from airflow.sdk import dag

from airflow_provider_vllm import ServerSpec, VllmBatchOperator, vllm_server

SERVER = ServerSpec(
    model=os.environ.get("EXAMPLE_MODEL", "Qwen/Qwen3-8B"),
    engine_args={
        "max_model_len": 1024,
        "enforce_eager": True,
        "dtype": os.environ.get("EXAMPLE_DTYPE", "auto"),
    },
)


@dag(schedule=None, catchup=False, tags=["vllm"])
def example_shared_server():
    with vllm_server(SERVER) as server:
        questions = VllmBatchOperator(
            task_id="questions",
            server=server,
            prompts=["What is the capital of Japan?", "What is the capital of Germany?"],
            sampling={"temperature": 0, "max_tokens": 40},
        )
        VllmBatchOperator(
            task_id="rephrase",
            server=server,
            prompts=questions.output,  # what the first batch answered
            batch={"prompt_template": "Say it in other words: {prompt}"},
            sampling={"temperature": 0, "max_tokens": 40},
        )


example_shared_server()
