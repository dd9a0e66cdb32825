"""Every day: the day's file of prompts in, the day's file of answers out, and a second DAG that reads them.

Both paths carry the day of the run, so that day two never meets day one's file, and a run that is
cleared a week later works on its own day again. The files live below the folder EXAMPLE_DATA.
"""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import Asset, CronDataIntervalTimetable, dag, task

from airflow_provider_vllm import ServerSpec, VllmBatchOperator

DATA = os.environ.get("EXAMPLE_DATA", "/data/vllm")
ANSWERS = Asset("vllm_daily_answers")
SERVER = ServerSpec(
    model=os.environ.get("EXAMPLE_MODEL", "Qwen/Qwen3-8B"),
    engine_args={
        "max_model_len": 1024,
        "enforce_eager": True,
        "dtype": os.environ.get("EXAMPLE_DTYPE", "auto"),
    },
)


@dag(schedule=CronDataIntervalTimetable("0 3 * * *", timezone="UTC"), catchup=False, tags=["vllm"])
def example_scheduled_files():
    VllmBatchOperator(
        task_id="answer",
        spec=SERVER,
        input_path=DATA + "/{{ data_interval_start | ds }}.jsonl",
        output_path=DATA + "/{{ data_interval_start | ds }}.answers.jsonl",
        sampling={"temperature": 0, "max_tokens": 40},
        outlets=[ANSWERS],
    )


@dag(schedule=[ANSWERS], catchup=False, tags=["vllm"])
def example_read_answers():
    @task(inlets=[ANSWERS])
    def count(*, triggering_asset_events: Any = None) -> int:
        """The manifest of the batch comes along with the event that triggered this run."""
        rows = 0
        for event in triggering_asset_events[ANSWERS]:
            manifest = event.extra["manifest"]
            print(f"{manifest['ok']} of {manifest['rows']} answered, see {manifest['output_path']}")
            rows += manifest["rows"]
        return rows

    count()


example_scheduled_files()
example_read_answers()
