"""The arguments of a VllmBatchOperator go in, the BatchSpec comes out.

Two doors onto one rule: `build` when the task runs, and `check` while the DAG file is read, for what is
literal then. Invariant: `check` refuses nothing that `build` could accept once templates are rendered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from airflow_provider_vllm.batch.parameters import check_names
from airflow_provider_vllm.batch.spec import BatchSpec, suffix_of
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts
from airflow_provider_vllm.names import nearest, type_of
from airflow_provider_vllm.operators.literals import STAND_IN, Literals
from airflow_provider_vllm.operators.spec_template import SPEC_PLACES

# Arguments of the operator that are fields of the BatchSpec, and templated.
ROWS = ("prompts", "input_path", "output_path")
SERVERS = ("spec", "server", "vllm_conn_id")
# All that is looked at here but `spec`, as the operator's attributes are called.
ARGUMENTS = (
    *SERVERS[1:], *ROWS, "endpoint", "sampling", "batch", "row_offset", "server_restarts",
)  # fmt: skip
# What stands for a field that is rendered later, where its presence alone matters.
_STAND_INS: dict[str, Any] = {
    "prompts": (STAND_IN,),
    "input_path": f"{STAND_IN}/input",
    "output_path": f"{STAND_IN}/output",
    "answer_column": f"{STAND_IN}/answer",
    "error_column": f"{STAND_IN}/error",
}
# Sampling parameters as vLLM's chat completions name them.
_SAMPLING = frozenset(
    """
    temperature top_p top_k min_p max_tokens max_completion_tokens n seed stop stop_token_ids logprobs
    top_logprobs logit_bias presence_penalty frequency_penalty repetition_penalty min_tokens ignore_eos
    response_format structured_outputs chat_template_kwargs
    """.split()  # noqa: SIM905 - names read better as text
)
_OWN = {*ROWS, *SERVERS, "endpoint", "row_offset", "params"}  # `params` is an argument of Airflow's
# How to write what is no argument of the operator.
PLACES = {
    **{name: f"batch={{{name!r}: ...}}" for name in BatchSpec.__dataclass_fields__},
    **{name: f"sampling={{{name!r}: ...}}" for name in _SAMPLING},
    **SPEC_PLACES,
}
for _name in _OWN:
    PLACES.pop(_name, None)


def build(arguments: Mapping[str, Any]) -> BatchSpec:
    """The BatchSpec of rendered arguments: ROWS, `endpoint`, `row_offset`, `sampling` and `batch`, whose
    fields win. Raises InvalidInput."""
    sampling = _mapping("sampling", arguments.get("sampling"))
    batch = _mapping("batch", arguments.get("batch"))
    for name in batch:
        if name not in BatchSpec.__dataclass_fields__:
            raise InvalidInput(_no_field(name))
    given = {
        name: arguments[name]
        for name in (*ROWS, "endpoint", "row_offset")
        if arguments.get(name) is not None
    }
    params = {
        name: _as_json(place, name, value)
        for place, values in (("batch['params']", batch.get("params")), ("sampling", sampling))
        for name, value in _mapping(place, values).items()
    }
    fields = {**given, **batch, "params": params}
    for name in ("input_path", "output_path", "errors_path"):
        fields[name] = path_text(fields.get(name))
    spec = BatchSpec(**fields)
    if arguments.get("vllm_conn_id") is None:  # else the server may be another than vLLM
        check_names(spec.endpoint, spec.params)
    return spec


def check(arguments: Mapping[str, Any], literals: Literals, *, complete: bool) -> None:
    """Raises InvalidInput for what is wrong with what is literal.

    `complete`: False in `.partial()`, where further arguments are to come.
    """
    _check_servers(arguments, literals, complete)
    if not complete:
        _check_own_outputs(arguments, literals)
    restarts = arguments.get("server_restarts", 0)
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise InvalidInput(f"server_restarts is {restarts!r}: give a number from 0.")
    shown = dict(arguments)
    for name in ("sampling", "batch"):
        value = shown.get(name)
        if isinstance(value, Mapping):
            shown[name] = _judged(value, literals)
        elif not _is_known(value, literals):
            shown[name] = {}
            complete = complete and name == "sampling"  # rows may come with `batch`
    shown |= _judged({name: shown.get(name) for name in ROWS}, literals)
    if not complete:
        _complete(shown)
    spec = build(shown)
    _check_early(spec)
    batch = arguments.get("batch")
    if complete and (batch is None or isinstance(batch, Mapping)):
        _check_suffixes(spec, batch or {}, literals)


def _check_early(spec: BatchSpec) -> None:
    """What the worker would refuse for its form alone, before it looks at any file."""
    if spec.prompt_template is not None:
        from airflow_provider_vllm.batch.template import Template

        Template(spec.prompt_template)
    if spec.output_schema is not None:
        from airflow_provider_vllm.batch.schema import checker

        checker(spec.output_schema)


def _check_suffixes(spec: BatchSpec, batch: Mapping[str, Any], literals: Literals) -> None:
    """Files of a format that nobody reads; `batch` as it was given, since its `input_format` may be rendered."""
    if spec.paths and batch.get("input_format") is None:
        from airflow_provider_vllm.batch.sources import GLOB, kind_of

        for path in spec.paths:
            suffix = suffix_of(path)
            if suffix and literals.known(path) and not GLOB.search(suffix):
                kind_of(path)


def path_text(value: Any) -> Any:
    """A path, an ObjectStoragePath or a list of them as text; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [path_text(item) for item in value]
    is_path = isinstance(value, os.PathLike) or hasattr(value, "protocol")
    return str(value) if is_path else value


def _check_servers(arguments: Mapping[str, Any], literals: Literals, complete: bool) -> None:
    given = [name for name in SERVERS if arguments.get(name) is not None]
    if len(given) > 1 or (complete and not given):
        raise InvalidInput(
            f"{' and '.join(given) or 'no server'} given: give exactly one of spec (a server of its own), "
            "server (a handle) and vllm_conn_id (somebody else's server)."
        )
    if "spec" in given:
        literals.check_spec(arguments["spec"])
    literals.check_server(arguments.get("server"))
    conn_id = arguments.get("vllm_conn_id")
    if conn_id is not None and _is_known(conn_id, literals) and not _is_text(conn_id):
        raise InvalidInput(f"vllm_conn_id is {conn_id!r}: give the id of a connection.")


def _check_own_outputs(arguments: Mapping[str, Any], literals: Literals) -> None:
    """Each mapped task needs a file of its own: one path for all can only be a mistake."""
    batch = arguments.get("batch")
    given = {**arguments, **(batch if isinstance(batch, Mapping) else {})}
    for name in ("output_path", "errors_path"):
        path = path_text(given.get(name))
        if isinstance(path, str) and literals.known(path):
            raise InvalidPrompts(
                f"{name} {path!r} is the same for every mapped task: put {{{{ ti.map_index }}}} into it, "
                "or expand over it."
            )


def _judged(fields: Mapping[str, Any], literals: Literals) -> dict[str, Any]:
    """What is known of some fields, and stand-ins for the others where presence matters."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "prompts" and isinstance(value, (list, tuple)):
            out[name] = value  # what is in it is judged row by row; there may be very many
        elif name == "input_path" and isinstance(value, (list, tuple)):
            out[name] = literals.filled(path_text(value))
        elif _is_known(path_text(value), literals):
            out[name] = value
        elif name in _STAND_INS:
            out[name] = _STAND_INS[name]
    return out


def _is_known(value: Any, literals: Literals) -> bool:
    """Airflow calls an argument that is a function, and takes what it returns."""
    return literals.known(value) and (isinstance(value, type) or not callable(value))


def _complete(shown: dict[str, Any]) -> None:
    """Stand-ins for the rows that are to come."""
    batch = _mapping("batch", shown.get("batch"))
    given = {name for name in ROWS if shown.get(name) is not None or batch.get(name) is not None}
    if not given & {"prompts", "input_path"}:
        shown["prompts"] = _STAND_INS["prompts"]
    elif "output_path" not in given:
        shown["output_path"] = _STAND_INS["output_path"]


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name} is {type_of(value)}: give a dict.")
    return value


def _as_json(place: str, name: Any, value: Any) -> Any:
    """A parameter as a request holds it: keys as text (`logit_bias={50256: -100}`), tuples as lists.

    Said here, since every row would fail by it, and only once the server is up.
    """
    try:
        text = json.dumps(value, allow_nan=False, default=lambda item: item.tolist())  # numpy's
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"{place}[{name!r}] is {value!r:.200}, which no request can hold ({error}): give what JSON has, texts, "
            "finite numbers, True, False, None, lists and dicts."
        ) from None
    return json.loads(text)


def _no_field(name: Any) -> str:
    if name in _SAMPLING:
        hint = f"write sampling={{{name!r}: ...}}."
    elif found := nearest(name, BatchSpec.__dataclass_fields__):
        hint = f"did you mean {found!r}?"
    else:
        hint = f"its fields are {', '.join(BatchSpec.__dataclass_fields__)}."
    return f"batch has no field {name!r}: {hint}"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
