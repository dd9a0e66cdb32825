"""A ServerSpec: what is refused, and what becomes of the rest."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
from typing import Any

import pytest

from airflow_provider_vllm.exceptions import InvalidInput, InvalidSpec
from airflow_provider_vllm.fields import OWNED_ARGS
from airflow_provider_vllm.spec import ServerSpec, is_loopback


def argv(**engine_args: Any) -> list[str]:
    return ServerSpec("m", engine_args=engine_args).engine_argv()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (4096, ["--max-model-len=4096"]),
        (0.5, ["--max-model-len=0.5"]),
        ("text", ["--max-model-len=text"]),
        ("-1", ["--max-model-len=-1"]),
        ("--host 0.0.0.0", ["--max-model-len=--host 0.0.0.0"]),
        (True, ["--max-model-len"]),
        (False, ["--no-max-model-len"]),
        (None, []),
        ([1, "b"], ["--max-model-len", "1", "b"]),
        ([], []),
        ({"a": [1, {"b": None}]}, ['--max-model-len={"a": [1, {"b": null}]}']),
    ],
)
def test_the_forms_of_an_engine_argument(value: Any, words: list[str]) -> None:
    assert argv(max_model_len=value) == words


def test_names_take_dashes_or_underscores_and_keys_of_json_options() -> None:
    spec = ServerSpec("m", engine_args={"max-model-len": 1, "compilation_config.cache_dir": "/x"})
    assert spec.engine_argv() == ["--max-model-len=1", "--compilation-config.cache_dir=/x"]


def test_a_plain_store_true_flag_has_no_negation() -> None:
    assert argv(aggregate_engine_logging=False) == []
    assert argv(aggregate_engine_logging=True) == ["--aggregate-engine-logging"]


@pytest.mark.parametrize("name", sorted(OWNED_ARGS))
def test_an_option_of_the_provider_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(InvalidSpec, match="is set by the provider"):
        ServerSpec("m", engine_args={name: "x"})


@pytest.mark.parametrize(
    "name",
    [
        "api-key", "api_ke", "ap", "API_KEY", "Api-Key", "api_key.x", "api-.x", "ho", "hos", "host.",
        "por", "p", "serv", "served-model", "conf", "config", "no_disable_log_stats", "ssl-key", "hf_tok",
        "ud", "head", "lora-m",
    ],
)  # fmt: skip
def test_an_abbreviation_or_another_spelling_of_such_an_option_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpec, match="is set by the provider"):
        ServerSpec("m", engine_args={name: "x"})


@pytest.mark.parametrize(
    "name",
    [
        "--api-key",
        "-api-key",
        "",
        " api_key",
        "max_model_len=1 --api-key",
        "a b",
        "a=b",
        "a\n",
        "x\0",
        "é",
        1,
        None,
        "_x",
        "a+",
    ],
)
def test_what_is_no_option_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidSpec, match="is no option name"):
        ServerSpec("m", engine_args={name: "x"})


@pytest.mark.parametrize("value", [["a", "--api-key", "x"], ["-q"], ("--host",)])
def test_an_item_of_a_list_cannot_become_an_option(value: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"engine_args\['tool_names'\].*can't start with a dash"):
        ServerSpec("m", engine_args={"tool_names": value})


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, [None], [[1]], {"a": object()}, b"x", "a\0b", ["a\0b"]]
)
def test_values_that_no_command_line_can_hold_are_refused(value: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"engine_args\['foo'\]"):
        ServerSpec("m", engine_args={"foo": value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""), ("model", "  "), ("model", None), ("model", 3), ("model", "--api-key"), ("model", "a\nb"),
        ("model", "a\0"),
        ("served_model_name", "-x"), ("served_model_name", "a\nb"), ("served_model_name", 7),
        ("python", ""), ("python", "-c"), ("auth_conn_id", ""), ("hf_conn_id", 3),
        ("host", ""), ("host", "http://x"), ("host", "a b"), ("host", "{model}"), ("host", "-h"), ("host", None),
        ("port", -1), ("port", 65536), ("port", "80"), ("port", True), ("port", 1.5),
        ("startup_timeout", 0), ("startup_timeout", "1"), ("startup_timeout", math.nan), ("startup_timeout", math.inf),
        ("idle_timeout", 0.5), ("idle_timeout", None), ("idle_timeout", math.inf),
        ("max_lifetime", 0), ("max_lifetime", math.inf), ("start_attempts", 0), ("start_attempts", 1.5),
        ("gpu_wait_timeout", -1), ("preflight", "no"), ("preflight", []), ("preflight", True),
        ("gpus", -1), ("gpus", 1.5), ("gpus", True), ("gpus", "GPU-1"), ("gpus", []), ("gpus", ["0"]),
        ("gpus", ["GPU-a", "GPU-a"]), ("gpus", ["GPU-a\n"]), ("gpus", ["GPU-a,GPU-b"]),
        ("engine_args", None), ("engine_args", [("a", 1)]), ("env", None), ("env", {"A": 1}), ("env", {"A=B": "x"}),
        ("env", {"A\n": "x"}), ("env", {"": "x"}), ("env", {"A": "x\0"}), ("env", {"VLLM_API_KEY": "x"}),
        ("env", {"CUDA_VISIBLE_DEVICES": "0"}), ("env", {"AIRFLOW_VLLM_START": "x"}),
        ("command", []), ("command", ["serve"]), ("command", 7), ("command", ["{port}", 1]),
        ("command", ["{port}", "a\0"]),
        ("lora_modules", {"-x": "p"}), ("lora_modules", {"--api-key": "p"}), ("lora_modules", {"a=b": "p"}),
        ("lora_modules", {"a": ""}), ("lora_modules", {"a": "p\n--x"}), ("lora_modules", {"a\n": "p"}),
        ("lora_modules", ["a"]),
        ("lora_modules", {1: "p"}),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidSpec, match=rf"ServerSpec\.{field}"):
        ServerSpec(**{"model": "m", field: value})


def test_errors_are_value_errors_too_and_hold_no_secret() -> None:
    with pytest.raises(ValueError, match="ServerSpec") as caught:
        ServerSpec("m", env={"A_TOKEN": "hidden-value\0"})
    assert isinstance(caught.value, InvalidInput)
    assert "hidden-value" not in str(caught.value)
    assert "hidden-value" not in repr(ServerSpec("m", env={"A_TOKEN": "hidden-value"}))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_model_len", r"goes into engine_args, as engine_args=\{'max_model_len': ...\}"),
        ("tensor_parallel_size", "goes into engine_args"),
        ("enforce_eager", "goes into engine_args"),
        ("gpu_memory_utilization", "goes into engine_args"),
        ("dtype", "goes into engine_args"),
        ("api_key", "use the field auth_conn_id"),
        ("hf_token", "use the field hf_conn_id"),
        ("startup_timout", "did you mean 'startup_timeout'"),
        ("engine_arg", "did you mean 'engine_args'"),
        ("Model", "did you mean 'model'"),
        ("gpu", "did you mean 'gpus'"),
        ("max-lifetime", "did you mean 'max_lifetime'"),
        (7, "goes into engine_args"),
    ],
)
def test_an_unknown_field_is_told_where_it_belongs(name: Any, said: str) -> None:
    with pytest.raises(InvalidSpec, match=rf"ServerSpec has no field {name!r}: .*{said}") as caught:
        ServerSpec.of({"model": "m", name: "s3cret"})
    assert "s3cret" not in str(caught.value)
    if isinstance(name, str):
        with pytest.raises(InvalidSpec, match=rf"ServerSpec has no field {name!r}: .*{said}"):
            ServerSpec("m", **{name: "s3cret"})  # type: ignore[arg-type]


def test_the_constructor_keeps_its_signature_and_copies() -> None:
    assert list(inspect.signature(ServerSpec).parameters)[:2] == ["model", "served_model_name"]
    spec = ServerSpec.of(FULL)
    assert dataclasses.replace(spec, port=1).port == 1
    assert copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec)) == spec


def test_other_types() -> None:
    with pytest.raises(InvalidSpec, match=r"ServerSpec\.model is missing"):
        ServerSpec.of({})
    with pytest.raises(InvalidSpec, match="spec is a str"):
        ServerSpec.of("m")  # type: ignore[arg-type]


FULL = {
    "model": "org/name",
    "gpus": ["GPU-a", "MIG-b"],
    "engine_args": {
        "x1": 1,
        "x2": [1, "x"],
        "x3": {"d": [1.5, None, {"e": True}]},
        "x4": False,
        "x5": None,
    },
    "env": {"HF_HOME": "/h", "MY_TOKEN": "hidden"},
    "python": "/venv/bin/python",
    "command": ["serve", "--port", "{port}"],
    "host": "0.0.0.0",
    "port": 8000,
    "auth_conn_id": "key",
    "hf_conn_id": "hub",
    "startup_timeout": 60,
    "start_attempts": 3,
    "gpu_wait_timeout": 0,
    "idle_timeout": 30.5,
    "max_lifetime": 3600,
    "lora_modules": {"one": "/lora"},
    "preflight": "warn",
}


def test_json_round_trip() -> None:
    spec = ServerSpec.of(FULL)
    assert ServerSpec.of(json.loads(json.dumps(spec.to_json()))) == spec
    tuples = ServerSpec("m", engine_args={"x3": {"d": (1, 2)}})
    assert ServerSpec.of(json.loads(json.dumps(tuples.to_json()))) == tuples


def test_the_public_form() -> None:
    spec = ServerSpec.of(FULL)
    assert spec.public()["env"] == {"HF_HOME": "/h", "MY_TOKEN": "***"}
    assert ServerSpec.of(spec.public()).fingerprint == spec.fingerprint


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"model": "other"}, False),
        ({"engine_args": {"dtype": "half"}}, False),
        ({"engine_args": {"hf-overrides": {"a": 1}}}, False),
        ({"engine_args": {"x1": 2, "gpu_memory_utilization": 0.5}}, True),
        ({"lora_modules": {"one": "/other"}}, False),
        ({"command": ["serve", "{port}", "--x"]}, False),
        ({"port": 1}, True),
        ({"env": {}}, True),
        ({"idle_timeout": 1}, True),
        ({"python": "/other"}, True),
        ({"gpus": 1}, True),
    ],
)
def test_the_fingerprint_changes_with_what_can_change_an_answer(change: dict, same: bool) -> None:
    changed = ServerSpec.of({**FULL, **change})
    assert (changed.fingerprint == ServerSpec.of(FULL).fingerprint) is same
    assert len(changed.fingerprint) == 16


def test_the_fingerprint_does_not_depend_on_the_order_of_options() -> None:
    one = ServerSpec("m", engine_args={"x1": 1, "x2": {"x": 1, "y": 2}})
    two = ServerSpec("m", engine_args={"x2": {"y": 2, "x": 1}, "x1": 1})
    assert one.fingerprint == two.fingerprint


def test_defaults_that_are_derived() -> None:
    assert ServerSpec("org/name/").served_model_name == "name"
    assert ServerSpec.of({"model": "name", "served_model_name": None}).served_model_name == "name"
    line = {"model": "m", "command": "serve --port {port}"}
    assert ServerSpec.of(line).command == ("serve", "--port", "{port}")
    assert ServerSpec("m", lora_modules={}).lora_modules is None


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "gpu-host", "::", "127.1", "2130706433"])
def test_beyond_loopback_only_with_a_password(host: str) -> None:
    with pytest.raises(InvalidSpec, match=r"ServerSpec\.host.*auth_conn_id"):
        ServerSpec("m", host=host)
    assert ServerSpec("m", host=host, auth_conn_id="key").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert is_loopback(ServerSpec("m", host=host).host)
