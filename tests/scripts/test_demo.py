"""`make demo` from the outside: the two examples through a real Airflow on a real vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.demo import prompts_of, table
from scripts.set_up import ROOT

PROGRAM = """
import sys
from pathlib import Path
from scripts import demo
{set_up}
sys.exit(demo.main(Path({home!r})))
"""


def demo(home: Path, set_up: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run the demo with its Airflow in `home`, after the statement `set_up`."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(set_up=set_up, home=str(home))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("rendered", "sent"),
    [
        ({"prompts": ["a", "b"]}, ["a", "b"]),
        ({"prompts": '["a", "b"]', "batch": None}, ["a", "b"]),
        ({"prompts": "a", "batch": "{}"}, ["a"]),
        ({"prompts": ["a"], "batch": {"prompt_template": "Say {prompt}!"}}, ["Say a!"]),
        ({"prompts": '["a"]', "batch": '{"prompt_template": "Say {prompt}!"}'}, ["Say a!"]),
        ({"prompts": [{"q": 1}]}, ['{"q": 1}']),
        ({}, []),
    ],
)
def test_the_table_shows_prompts_as_they_were_sent(
    rendered: dict[str, Any], sent: list[str]
) -> None:
    assert prompts_of(rendered) == sent
    assert len(list(table(sent, ["answer"] * len(sent)))) == 2 + len(sent)


@pytest.mark.vllm
@pytest.mark.stack
@pytest.mark.usefixtures("vllm_python", "instruct_model")
def test_demo_answers_shows_its_stages_and_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"

    done = demo(home)

    assert done.returncode == 0, done.stdout
    assert (
        "What is the capital of France?                The capital of France is Paris."
        in done.stdout
    )
    assert "Say it in other words:" in done.stdout, "the prompt as it was sent"
    assert "start_vllm_server        success" in done.stdout
    assert "stop_vllm_server         success" in done.stdout
    assert done.stdout.count('"errors": 0') == 3  # the manifests of three batches
    assert "[3/4] example_one_task: done in" in done.stdout
    assert "left behind: no process" in done.stdout
    assert list((home / "logs").rglob("task_id=ask/attempt=1.log"))
    assert list((home / "vllm").rglob("vllm.log"))


@pytest.mark.stack
def test_a_failed_run_ends_the_demo_with_its_log_and_a_status(tmp_path: Path) -> None:
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "broken.py").write_text(
        "from airflow.sdk import dag, task\n"
        "@dag(schedule=None)\n"
        "def broken():\n"
        "    @task\n"
        "    def fail():\n"
        "        raise RuntimeError('no such luck')\n"
        "    fail()\n"
        "broken()\n"
    )

    done = demo(tmp_path / "home", f"demo.EXAMPLES = ('broken',); demo.DAGS = Path({str(dags)!r})")

    assert done.returncode == 1
    assert "RuntimeError: no such luck" in done.stdout
    assert "left behind: no process" in done.stdout
