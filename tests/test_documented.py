"""The Python in README.md and docs/: each piece is read by Airflow as a DAG file, and wired as it says."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from scripts.set_up import ROOT
from tests import airflow_unit  # noqa: F401 - before Airflow is imported
from tests.airflow_unit import stored

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PIECES = [
    (path.name, text)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for text in BLOCK.findall(path.read_text(encoding="utf-8"))
]
AROUND = "from airflow.sdk import DAG\n\nwith DAG('piece'):\n"


def dag_of(text: str, folder: Path) -> Any:
    from airflow.dag_processing.dagbag import DagBag

    path = folder / "documented.py"
    path.write_text(text if "@dag" in text else AROUND + textwrap.indent(text, "    "))
    bag = DagBag(path, load_op_links=False)
    assert bag.import_errors == {}
    (dag,) = bag.dags.values()
    return dag


def piece(word: str) -> str:
    (found,) = [text for _, text in PIECES if word in text]
    return found


@pytest.mark.parametrize(("where", "text"), PIECES, ids=lambda value: value[:30])
def test_a_piece_is_a_dag(where: str, text: str, tmp_path: Path) -> None:
    dag = dag_of(text, tmp_path)
    assert dag.task_ids
    stored(dag)


def test_the_server_is_around_the_tasks_that_share_it(tmp_path: Path) -> None:
    dag = dag_of(piece("with vllm_server"), tmp_path)
    assert dag.get_task("start_vllm_server").is_setup
    assert {"first", "each"} <= dag.get_task("start_vllm_server").downstream_task_ids
    assert {"second", "each"} <= dag.get_task("stop_vllm_server").upstream_task_ids


def test_without_a_gpu_the_settings_reach_vllm(tmp_path: Path) -> None:
    from airflow_provider_vllm import ServerSpec

    task: Any = dag_of(piece("VLLM_CPU_KVCACHE_SPACE"), tmp_path).get_task("try")
    spec = ServerSpec.of(task.spec.fields)
    assert spec.gpus == 0
    assert spec.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert spec.engine_args["enforce_eager"] is True


def test_a_class_and_a_dict_are_schemas_after_rendering_too(tmp_path: Path) -> None:
    from airflow_provider_vllm.batch.spec import schema_of
    from airflow_provider_vllm.operators.batch_arguments import build

    dag = dag_of(piece("class Review"), tmp_path)
    for task_id, field in (("by_class", "stars"), ("by_schema", "country")):
        task: Any = dag.get_task(task_id)
        task.render_template_fields({})
        schema = schema_of(build({"prompts": task.prompts, "batch": task.batch}).output_schema)
        assert schema is not None
        assert field in schema["properties"]


def test_the_shards_are_split_mapped_and_merged(tmp_path: Path) -> None:
    dag = dag_of(piece("task(split)"), tmp_path)
    assert dag.get_task("ask").upstream_task_ids == {"split"}
    assert dag.get_task("merge").upstream_task_ids == {"ask"}


def test_braces_for_the_model_in_a_template(tmp_path: Path) -> None:
    from airflow_provider_vllm import VllmBatchOperator
    from airflow_provider_vllm.batch.template import Template

    text = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
    (line,) = [each.strip() for each in text.splitlines() if "{% raw %}" in each]
    arguments: dict[str, Any] = eval(f"dict({line})")
    operator: Any = VllmBatchOperator(task_id="a", vllm_conn_id="c", prompts=["x"], **arguments)
    operator.render_template_fields({})
    filled = Template(operator.batch["prompt_template"]).fill({"text": "who?"})
    assert filled == 'Answer as {"name": ...}: who?'


@pytest.mark.parametrize("name", ["batch", "server"])
def test_every_option_is_in_its_table(name: str) -> None:
    from airflow_provider_vllm import ServerSpec
    from airflow_provider_vllm.batch.spec import BatchSpec

    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    table = text[text.index("## All options") :] if name == "batch" else text
    kind = BatchSpec if name == "batch" else ServerSpec
    # What the operator takes itself, as `sampling`.
    others = {"params"} if name == "batch" else set()
    missing = {field.name for field in dataclasses.fields(kind)} - others
    assert {each for each in missing if f"`{each}`" not in table} == set()
