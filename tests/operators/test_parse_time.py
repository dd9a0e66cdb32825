"""A literal argument that is wrong is an import error of the DAG; what is rendered later is not judged yet."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator, ObjectStoragePath, task

from airflow_provider_vllm import (
    ServerSpec,
    StartVllmServerOperator,
    StopVllmServerOperator,
    VllmBatchOperator,
    VllmServerReadySensor,
    vllm_server,
)
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidHandle, InvalidInput, InvalidPrompts
from airflow_provider_vllm.operators.batch_arguments import ARGUMENTS, PLACES, build
from tests.airflow_unit import context_of

SPEC = {"model": "m"}
FILES = {"input_path": "in.jsonl", "output_path": "out.jsonl"}
LATER = "{{ params.later }}"

# Arguments, and what the message says: all of it can be seen while the DAG file is read.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompts": None}, "give either prompts or input_path; neither was given"),
    ({"input_path": "in.jsonl"}, "give either prompts or input_path; both were given"),
    ({"prompts": None, "input_path": "in.jsonl"}, "output_path is missing"),
    ({"prompts": None, **FILES, "output_path": "in.jsonl"}, "output_path is the input in.jsonl"),
    ({"prompts": "one string"}, "prompts must be a list, not str"),
    ({"prompts": []}, "prompts is an empty list"),
    ({"prompts": {"x"}}, "prompts must be a list, not set"),
    ({"input_path": 3, "prompts": None, "output_path": LATER}, "input_path must be a path"),
    ({"endpoint": "chats"}, "endpoint 'chats' is not known"),
    ({"sampling": [1]}, "sampling is a list: give a dict"),
    ({"sampling": {"stream": True}}, "a batch does not stream"),
    ({"sampling": {"stop": {"a"}}}, r"sampling\['stop'\] is .*which no request can hold"),
    ({"sampling": {"temperature": float("nan")}}, r"sampling\['temperature'\] is nan, which no"),
    ({"batch": {"params": {"x": object()}}}, r"batch\['params'\]\['x'\] is .*no request can hold"),
    ({"batch": 3}, "batch is an int: give a dict"),
    ({"batch": {"max_eror_rate": 0.5}}, "no field 'max_eror_rate': did you mean 'max_error_rate'"),
    ({"batch": {"temperature": 0}}, r"no field 'temperature': write sampling=\{'temperature': ...\}"),
    ({"batch": {"wholly_other": 0}}, "no field 'wholly_other': its fields are prompts, "),
    ({"batch": {"max_error_rate": "0.5"}}, "max_error_rate is '0.5'"),
    ({"batch": {"max_errors": -1}}, "max_errors is -1"),
    ({"batch": {"concurrency": 0}}, "concurrency is 0"),
    ({"batch": {"request_timeout": 0}}, "request_timeout is 0"),
    ({"batch": {"output_schema": 3}}, "output_schema is an int"),
    ({"batch": {"answer_column": "a", "error_column": "a"}}, "have the same name"),
    ({"batch": {"prompt_template": "{a"}}, "prompt_template: "),
    ({"batch": {"output_schema": {"type": "txt"}}}, "output_schema is not a JSON schema"),
    ({"prompts": None, "input_path": "in.xlsx", "output_path": LATER}, "in.xlsx: its suffix says"),
    ({"prompts": None, "batch": {"input_path": ["a/*.pdf"], "output_path": LATER}}, "says no format"),
    ({"batch": {"params": 1}}, r"batch\['params'\] is an int"),
    ({"row_offset": -1}, "row_offset is -1"),
    ({"server_restarts": -1}, "server_restarts is -1"),
    ({"server_restarts": LATER}, "server_restarts is '{{ params.later }}'"),
    ({"spec": None}, "no server given: give exactly one of spec"),
    ({"server": {}}, "spec and server given: give exactly one"),
    ({"vllm_conn_id": "c"}, "spec and vllm_conn_id given: give exactly one"),
    ({"spec": None, "vllm_conn_id": ""}, "vllm_conn_id is ''"),
    ({"spec": None, "vllm_conn_id": 7}, "vllm_conn_id is 7"),
    ({"spec": None, "server": ServerSpec("m")}, "server is a ServerSpec: .*spec=..."),
    ({"spec": None, "server": "http://host:8000"}, "server is a str"),
    ({"spec": "Qwen/Qwen3-8B"}, "spec is a str: give a ServerSpec"),
    ({"spec": {"model": "m", "gpu": 1}}, "no field 'gpu': did you mean 'gpus'"),
    ({"spec": {}}, "ServerSpec.model is missing"),
    ({"spec": {"model": LATER, "gpus": -1}}, "ServerSpec.gpus is -1"),
    ({"spec": {"model": "m", "startup_timeout": "1"}}, "ServerSpec.startup_timeout is '1'"),
    ({"spec": {"model": "m", "host": "0.0.0.0"}}, "there is no password"),
    ({"spec": {"model": "m", "engine_args": {"port": LATER}}}, r"engine_args\['port'\] is set by"),
    ({"prompt_template": "{x}"}, r"no argument 'prompt_template': write batch=\{'prompt_template'"),
    ({"temperature": 0}, r"no argument 'temperature': write sampling=\{'temperature'"),
    ({"model": "m"}, r"no argument 'model': write spec=ServerSpec\(model=...\)"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_a_literal_mistake_is_named_with_its_task(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=f"^VllmBatchOperator 'ask': .*{said}"):
        VllmBatchOperator(task_id="ask", **{"spec": SPEC, "prompts": ["x"], **wrong})


@task
def made() -> Any: ...


def render(operator: Any, **context: Any) -> None:
    operator.render_template_fields(context)


def without_addresses(value: Any) -> str:
    """A test's id that is the same in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


# The same arguments, known only when the task runs.
RENDERED: list[dict[str, Any]] = [
    {"prompts": LATER},
    {"prompts": [LATER, {"prompt": "{% if x %}a{% endif %}"}]},
    {"prompts": None, "input_path": LATER, "output_path": LATER},
    {"prompts": None, "input_path": [LATER, "in.jsonl"], "output_path": "/d/{{ ds }}.csv"},
    {"prompts": None, "input_path": Path("in.csv"), "output_path": Path("out.parquet")},
    {"prompts": None, "input_path": ["/d/*", "/d/a.js*", "/d/{{ ds }}.x"], "output_path": LATER},
    {
        "prompts": None,
        "input_path": "a.log",
        "output_path": LATER,
        "batch": {"input_format": "text"},
    },
    {
        "prompts": None,
        "input_path": "a.log",
        "output_path": LATER,
        "batch": {"input_format": LATER},
    },
    {
        "prompts": None,
        "input_path": ObjectStoragePath("file:///d/{{ ds }}.csv"),
        "output_path": ObjectStoragePath("file:///d/{{ ds }}.out.csv"),
    },
    {"prompts": None, "batch": LATER},
    {"prompts": None, "batch": {"input_path": LATER, "output_path": LATER}},
    {"prompts": None, "batch": {"prompts": LATER}},
    {"sampling": LATER},
    {"sampling": {"stream": LATER, "temperature": LATER}},
    {"batch": {"max_error_rate": LATER, "output_schema": LATER, "concurrency": LATER}},
    {"batch": {"answer_column": LATER, "error_column": "response"}},
    {"batch": {"output_schema": {"type": LATER}, "input_format": LATER, "params": LATER}},
    {"batch": lambda context, jinja_env: {}, "prompts": lambda context, jinja_env: ["x"]},
    {"spec": LATER},
    {"spec": {"model": LATER, "gpus": LATER, "host": LATER, "startup_timeout": LATER}},
    {"spec": {"model": "m", "host": "0.0.0.0", "auth_conn_id": LATER}},
    {"spec": {"model": "m", "gpus": [LATER], "command": ["serve", LATER], "env": {"A": LATER}}},
    {"spec": {"model": "m", "engine_args": LATER, "env": LATER, "lora_modules": LATER}},
    {"spec": {"model": "m", "engine_args": {"seed": LATER, "x": [LATER], "y": {"z": LATER}}}},
    {"spec": ServerSpec(LATER)},
    {"spec": None, "server": LATER},
    {"spec": None, "vllm_conn_id": LATER},
]


@pytest.mark.parametrize("arguments", RENDERED, ids=without_addresses)
def test_what_is_rendered_later_is_not_judged(arguments: dict[str, Any]) -> None:
    arguments = {"task_id": "ask", "spec": SPEC, "prompts": ["x"], **arguments}
    with DAG("d", schedule=None, params={"later": 1}):
        VllmBatchOperator(**arguments)
        if isinstance(arguments.get("output_path"), Path):
            del arguments["output_path"]  # one for all
            arguments = {**arguments, "output_path": LATER}
        VllmBatchOperator.partial(**{**arguments, "task_id": "mapped"}).expand(doc=["a"])


@pytest.mark.parametrize("arguments", RENDERED, ids=without_addresses)
def test_nor_are_the_outputs_of_other_tasks(arguments: dict[str, Any]) -> None:
    with DAG("d", schedule=None):
        output = made()

        def filled(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: filled(item) for key, item in value.items()}
            if isinstance(value, list):
                return [filled(item) for item in value]
            return output if value == LATER else value

        VllmBatchOperator(**{"task_id": "ask", "spec": SPEC, "prompts": ["x"], **filled(arguments)})


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_a_mapped_task_is_judged_too(wrong: dict[str, Any], said: str) -> None:
    given = {"spec": SPEC, "prompts": ["x"], **wrong}
    fixed = {name: value for name, value in given.items() if value is not None}
    if said.startswith("output_path is the input"):
        said = "output_path 'in.jsonl' is the same for every mapped task"
    with (
        DAG("d", schedule=None),
        pytest.raises(InvalidInput, match=rf"^VllmBatchOperator 'ask': .*{said}"),
    ):
        VllmBatchOperator.partial(task_id="ask", **fixed).expand(doc=["a"])


@pytest.mark.parametrize("how", ["expand", "expand_kwargs", "output of a task"])
def test_what_a_task_is_expanded_over_is_judged_with_the_rest(how: str) -> None:
    def fine(task_id: str) -> Any:
        return VllmBatchOperator.partial(task_id=task_id, spec=SPEC)

    with DAG("d", schedule=None):
        partial = fine("ask")
        if how == "expand":
            fine("a").expand(prompts=[["x"], LATER, ["y"]])
            fine("b").expand(prompts=made())
            fine("c").expand(input_path=["a", "b"], output_path=made())
            wrong: Any = lambda: partial.expand(prompts=[["x"], "one"])  # noqa: E731
        elif how == "expand_kwargs":
            fine("a").expand_kwargs([{"prompts": ["x"]}, {"input_path": "a", "output_path": "b"}])
            wrong = lambda: partial.expand_kwargs([{"prompts": ["x"]}, {"prompts": "one"}])  # noqa: E731
        else:
            mapped = partial.expand_kwargs(made())
            mapped.unmap({"prompts": ["x"]})
            wrong = lambda: mapped.unmap({"prompts": "one"})  # noqa: E731
        with pytest.raises(
            InvalidPrompts, match=r"^VllmBatchOperator 'ask': prompts must be a list"
        ):
            wrong()


def test_one_output_for_all_mapped_tasks_is_refused() -> None:
    with DAG("d", schedule=None):
        for fixed in (
            {"output_path": "/d/out.jsonl"},
            {"output_path": Path("out.jsonl")},
            {"batch": {"output_path": "out.jsonl"}},
            {"output_path": LATER, "batch": {"errors_path": "errors.jsonl"}},
        ):
            with pytest.raises(InvalidPrompts, match=r"^VllmBatchOperator 'ask': .*ti\.map_index"):
                VllmBatchOperator.partial(task_id="ask", input_path="in.jsonl", **fixed)
        out = "/d/{{ ti.map_index }}.jsonl"
        partial = VllmBatchOperator.partial(task_id="ask", input_path="in", output_path=out)
        partial.expand(spec=[SPEC, ServerSpec("n")])


def test_parameters_take_the_form_that_a_request_has() -> None:
    import numpy

    sampling = {"logit_bias": {50256: -100}, "stop": ("a",), "temperature": numpy.float32(0.5)}
    operator = VllmBatchOperator(task_id="ask", spec=SPEC, prompts=["x"], sampling=sampling)
    assert build(operator._arguments()).params == {
        "logit_bias": {"50256": -100}, "stop": ["a"], "temperature": 0.5,
    }  # fmt: skip


def test_the_shards_of_split_are_arguments() -> None:
    shard = {"input_path": "work/shard-0000.jsonl", "row_offset": 26}
    with DAG("d", schedule=None):
        out = "work/{{ ti.map_index }}.jsonl"
        mapped = VllmBatchOperator.partial(task_id="ask", spec=SPEC, output_path=out)
        operator: Any = mapped.expand_kwargs([shard]).unmap(shard)
    assert (operator.input_path, operator.row_offset) == ("work/shard-0000.jsonl", 26)


def test_default_args_count_as_given() -> None:
    with DAG("d", schedule=None, default_args={"vllm_conn_id": "c", "sampling": {"seed": 1}}):
        operator = VllmBatchOperator(task_id="ask", prompts=["x"])
        assert (operator.vllm_conn_id, operator.sampling) == ("c", {"seed": 1})
        VllmBatchOperator.partial(task_id="mapped").expand(prompts=[["x"]])
        with pytest.raises(InvalidInput, match="spec and vllm_conn_id given"):
            VllmBatchOperator(task_id="two", spec=SPEC, prompts=["x"])


def test_the_format_of_an_input_may_be_expanded() -> None:
    with DAG("d", schedule=None):
        logs = VllmBatchOperator.partial(
            task_id="logs", spec=SPEC, input_path="a.log", output_path=LATER
        )
        logs.expand(batch=[{"input_format": "text"}])
        with pytest.raises(InvalidPrompts, match=r"a\.log: its suffix says no format"):
            VllmBatchOperator(task_id="ask", spec=SPEC, input_path="a.log", output_path=LATER)


def test_template_marks_of_the_dags_own() -> None:
    marks = {"variable_start_string": "[[", "variable_end_string": "]]"}
    with DAG("d", schedule=None, jinja_environment_kwargs=marks):
        batch = {"max_error_rate": "[[ params.rate ]]"}
        VllmBatchOperator(task_id="ask", spec=SPEC, prompts=["x"], batch=batch)


def test_a_rendered_mistake_is_named_when_the_task_runs() -> None:
    with DAG("d", schedule=None):
        operator = VllmBatchOperator(task_id="ask", spec=SPEC, prompts="{{ given }}")
    render(operator, given="one string")
    with pytest.raises(InvalidPrompts, match="prompts must be a list, not str"):
        operator.execute(context_of())


def test_a_rendered_connection_id() -> None:
    operator = VllmBatchOperator(task_id="ask", vllm_conn_id="gpu_{{ where }}", prompts=["x"])
    sensor = VllmServerReadySensor(task_id="wait", vllm_conn_id="gpu_{{ where }}")
    for each in (operator, sensor):
        render(each, where="north")
        assert each.vllm_conn_id == "gpu_north"


def test_the_other_operators() -> None:
    with pytest.raises(InvalidInput, match=r"^StartVllmServerOperator 'a': ServerSpec\.port is -1"):
        StartVllmServerOperator(task_id="a", spec={"model": "m", "port": -1})
    with pytest.raises(
        InvalidInput, match=r"^StartVllmServerOperator 'a': .*spec=ServerSpec\(gpus"
    ):
        StartVllmServerOperator(task_id="a", spec=SPEC, gpus=1)
    with pytest.raises(InvalidInput, match=r"^StartVllmServerOperator 'a': ServerSpec\.port is -1"):
        StartVllmServerOperator.partial(task_id="a", spec={"model": "m", "port": -1})
    StartVllmServerOperator.partial(task_id="a").expand(spec=[SPEC])
    with pytest.raises(InvalidHandle, match=r"^StopVllmServerOperator 'a': server is a str"):
        StopVllmServerOperator(task_id="a", server="start")  # type: ignore[arg-type]
    with pytest.raises(InvalidHandle, match=r"^VllmServerReadySensor 'a': server is a str"):
        VllmServerReadySensor(task_id="a", server="start")  # type: ignore[arg-type]
    for kind in (StopVllmServerOperator, VllmServerReadySensor):
        kind(task_id="a", server=LATER)  # type: ignore[arg-type]


JUNK: list[Any] = [
    "", "\0", "x\ny", "é" * 5000, "\udcff", 0, -1, 1.5, 2**70, float("nan"), 1j, True, b"x", (), [[]], {},
    {1: 2}, {"a": {1, 2}}, {"x": [object()]}, set(), range(3), iter([1]), len, object(), int, ...,
    Path("x"), Exception("x"), ServerSpec("m"), decimal.Decimal(1), datetime.date(2026, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("name", [*ARGUMENTS, "spec", *BatchSpec.__dataclass_fields__])
def test_junk_is_refused_in_words(name: str) -> None:
    """Taken or refused as InvalidInput, and nothing else."""
    for value in JUNK:
        rest = {"spec": SPEC, "prompts": ["x"], "output_path": LATER}
        if name in (*ARGUMENTS, "spec"):
            rest.pop(
                {"server": "spec", "vllm_conn_id": "spec", "input_path": "prompts"}.get(name, ""),
                None,
            )
            arguments: dict[str, Any] = {**rest, name: value}
        else:
            arguments = {**rest, "batch": {name: value}}
        with contextlib.suppress(InvalidInput):
            VllmBatchOperator(task_id="ask", **arguments)
        with contextlib.suppress(InvalidInput):
            VllmBatchOperator.partial(task_id="ask", **arguments).expand(doc=["a"])


@pytest.mark.parametrize("name", ServerSpec.__dataclass_fields__)
def test_junk_in_a_spec_is_refused_in_words(name: str) -> None:
    for value in JUNK:
        with contextlib.suppress(InvalidInput):
            StartVllmServerOperator(task_id="start", spec={"model": "m", name: value})


def test_what_is_easily_taken_for_a_handle() -> None:
    start: Any = StartVllmServerOperator(task_id="start", spec=SPEC)
    for given, said in (
        (vllm_server(SPEC), r"write `with vllm_server\(\.\.\.\) as server:`"),
        (start, "server is a StartVllmServerOperator: give the output of"),
    ):
        with pytest.raises(InvalidHandle, match=rf"^VllmBatchOperator 'ask': .*{said}"):
            VllmBatchOperator(task_id="ask", server=given, prompts=["x"])  # type: ignore[arg-type]
    with pytest.raises(InvalidPrompts, match=r"must be a list, not StartVllmServerOperator"):
        VllmBatchOperator(task_id="ask", server=start.output, prompts=start)


def test_no_argument_of_airflows_own_is_taken_for_one_of_ours() -> None:
    assert not set(PLACES) & set(inspect.signature(BaseOperator.__init__).parameters)


def test_an_operator_of_the_users_own_keeps_its_arguments() -> None:
    class Mine(VllmBatchOperator):
        def __init__(self, *, model: str, **kwargs: Any) -> None:
            super().__init__(spec={"model": model}, **kwargs)

    with DAG("d", schedule=None):
        Mine(task_id="one", model="m", prompts=["x"])
        Mine.partial(task_id="mapped", model="m").expand(prompts=[["x"]])
        mapped = Mine.partial(task_id="over_models", prompts=["x"]).expand(model=["m"])
    operator: Any = mapped.unmap({"model": "m"})
    assert operator.spec.build().model == "m"


def test_it_is_an_import_error_of_the_dag(tmp_path: Path) -> None:
    from airflow.dag_processing.dagbag import DagBag

    path = tmp_path / "wrong.py"
    path.write_text(
        "from airflow.sdk import dag\n"
        "from airflow_provider_vllm import VllmBatchOperator\n"
        "@dag(schedule=None)\n"
        "def wrong():\n"
        "    VllmBatchOperator(task_id='ask', vllm_conn_id='c', input_path='a.csv')\n"
        "wrong()\n"
    )
    (said,) = DagBag(path, load_op_links=False).import_errors.values()
    assert "VllmBatchOperator 'ask': output_path is missing" in said
