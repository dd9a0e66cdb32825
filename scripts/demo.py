"""Runs two example DAGs through a real Airflow and shows what they did.

Enters: what set_up.py made, and `MODEL` of the environment. Leaves: each stage with its time, the
prompts and answers as a table, the manifests, and where the logs are. Ends with status 1 when a
run failed or a server was left behind.

    make demo        MODEL=Qwen/Qwen3-8B make demo
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_provider_vllm.batch.template import Template
from scripts.airflow_client import AirflowClient, ApiError, WaitTimedOut
from scripts.airflow_stack import StackFailed
from scripts.example_airflow import example_airflow, example_model
from scripts.follow import Follower
from scripts.progress import Progress
from scripts.set_up import ROOT

HOME = ROOT / ".demo" / "demo"
DAGS = ROOT / "dags"
EXAMPLES = ("example_one_task", "example_shared_server")
# A model that comes over the network, on a slow line, before its first answer.
RUN_TIMEOUT_S = 3600.0
PROMPT_WIDTH, ANSWER_WIDTH = 44, 60


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    dag_id: str
    run_id: str
    state: str


def main(home: Path = HOME) -> int:
    """Run the demo with its Airflow in `home`; the exit status."""
    progress = Progress(2 + len(EXAMPLES))
    progress.say(f"model: {example_model()}")
    try:
        stack = example_airflow(home, [DAGS], progress, fresh=True)  # one demo's logs at a time
    except StackFailed as error:
        print(error, file=sys.stderr)
        return 1
    try:
        stack.start()
        runs = [run_example(stack.client, dag_id, progress) for dag_id in EXAMPLES]
        for run in runs:
            show(stack.client, run)
    except (StackFailed, WaitTimedOut, ApiError) as error:
        print(f"\n{error}", file=sys.stderr)
        runs = []
    finally:
        left = stack.stop()
    return conclude(home, progress, runs, left)


def run_example(client: AirflowClient, dag_id: str, progress: Progress) -> Run:
    """Start a run of the DAG and show it until it has ended."""
    with progress.stage(dag_id) as note:
        run_id = client.run_dag(dag_id)
        state = Follower(client, dag_id, run_id, progress.say).finish(RUN_TIMEOUT_S)
        note.text = state
    return Run(dag_id, run_id, state)


def show(client: AirflowClient, run: Run) -> None:
    """Print a run's tasks with their times, then answers and manifest of each batch in it."""
    print(f"\n{run.dag_id}: {run.state}")
    tasks = client.tasks(run.dag_id, run.run_id)
    for task in sorted(tasks, key=lambda task: task.start_date or "~"):  # what never started, last
        print(f"  {task.name:24} {task.state!s:16} {task.duration or 0:7.1f} s")
        if task.state == "failed":
            log = client.log(run.dag_id, run.run_id, task.task_id, task.try_number, task.map_index)
            print(textwrap.indent("\n".join(log.splitlines()[-15:]), "    | "))
        try:
            manifest = client.xcom(run.dag_id, run.run_id, task.task_id, "manifest")
            answers = client.xcom(run.dag_id, run.run_id, task.task_id)
        except ApiError:
            continue  # not a batch, or one that failed
        print()
        for line in table(prompts_of(task.rendered_fields), answers):
            print(f"    {line}")
        print(
            f"\n    manifest: {textwrap.indent(json.dumps(manifest, indent=2), '    ').strip()}\n"
        )


def prompts_of(rendered: dict[str, Any]) -> list[str]:
    """The prompts of a batch as it sent them: what its rendered arguments show, in its template."""
    prompts = _shown(rendered.get("prompts")) or []
    if isinstance(prompts, str):
        prompts = [prompts]
    texts = [each if isinstance(each, str) else json.dumps(each) for each in prompts]
    batch = _shown(rendered.get("batch"))
    text = batch.get("prompt_template") if isinstance(batch, dict) else None
    return [Template(text).fill({"prompt": each}) for each in texts] if text else texts


def _shown(value: Any) -> Any:
    """A rendered argument, which the REST API gives as JSON or as JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def table(prompts: list[str], answers: list[str]) -> Iterator[str]:
    """Lines of a table of two columns, each wrapped."""
    yield f"{'prompt':{PROMPT_WIDTH}}  answer"
    yield f"{'-' * PROMPT_WIDTH}  {'-' * ANSWER_WIDTH}"
    for prompt, answer in zip(prompts, answers, strict=False):
        left = textwrap.wrap(prompt, PROMPT_WIDTH) or [""]
        right = textwrap.wrap(str(answer), ANSWER_WIDTH) or [""]
        height = max(len(left), len(right))
        left += [""] * (height - len(left))
        right += [""] * (height - len(right))
        for one, other in zip(left, right, strict=True):
            yield f"{one:{PROMPT_WIDTH}}  {other}".rstrip()


def conclude(home: Path, progress: Progress, runs: list[Run], left: list[str]) -> int:
    """Print where the time went and where the logs are; the exit status."""
    print("\nstages:")
    for name, seconds in progress.times:
        print(f"  {name:24} {seconds:7.1f} s")
    print(f"logs of tasks: {home / 'logs'}\nlogs of Airflow's parts: {home / 'parts'}")
    print(f"servers (state, vLLM's log): {home / 'vllm'}")
    print("left behind: " + ("\n  ".join(["", *left]) if left else "no process"))
    green = len(runs) == len(EXAMPLES) and all(run.state == "success" for run in runs)
    return 0 if green and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
