"""One task: a model, prompts, answers. The server lives inside the task.

This works with every executor, since nothing outlives the task. Set the model with the environment
variable EXAMPLE_MODEL on the workers and the DAG processor (a path or a hub id), and EXAMPLE_DTYPE where vLLM's
own choice will not do (float32 for its CPU build).
"""

from __future__ import annotations

import os

from airflow.sdk import dag, task

from airflow_provider_vllm import ServerSpec, VllmBatchOperator

SERVER = ServerSpec(
    model=os.environ.get("EXAMPLE_MODEL", "Qwen/Qwen3-8B"),
    engine_args={
        "max_model_len": 1024,
        "enforce_eager": True,
        "dtype": os.environ.get("EXAMPLE_DTYPE", "auto"),
    },
)


@dag(schedule=None, catchup=False, tags=["vllm"])
def example_one_task():
    answers = VllmBatchOperator(
        task_id="ask",
        spec=SERVER,
        prompts=[
            "What is the capital of France?",
            "What is the capital of Japan?",
            "Name three colours of the rainbow.",
        ],
        sampling={"temperature": 0, "max_tokens": 40},
    )

    @task
    def show(answers: list[str]) -> None:
        for answer in answers:
            print(answer)

    show(answers.output)  # type: ignore[arg-type]  # Airflow passes the list


example_one_task()
