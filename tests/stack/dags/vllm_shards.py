"""One input split, a mapped batch for each part on a shared server, and the answers merged; conf: `spec`, `folder`."""

from __future__ import annotations

from typing import Any

from airflow.sdk import dag, task

from airflow_provider_vllm import VllmBatchOperator, vllm_server
from airflow_provider_vllm.batch.shards import merge, split

SPEC: Any = "{{ dag_run.conf['spec'] }}"
FOLDER = "{{ dag_run.conf['folder'] }}"


@dag(schedule=None, catchup=False, render_template_as_native_obj=True)
def vllm_shards() -> None:
    shards: Any = task(split)(FOLDER + "/in.csv", FOLDER + "/work", shards=3)
    with vllm_server(SPEC) as server:
        parts = VllmBatchOperator.partial(
            task_id="ask",
            server=server,
            output_path=FOLDER + "/work/answers-{{ ti.map_index }}.parquet",
            batch={"prompt_template": "Summarise {title}: {text}"},
        ).expand_kwargs(shards)
    task(merge)(parts.output, FOLDER + "/answers.parquet")


vllm_shards()
