"""A BatchSpec that exists is consistent in itself."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidInput, InvalidPrompts

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "neither"),
    ({"prompts": ["a"], "input_path": "x.jsonl", "output_path": "y"}, "both"),
    ({"prompts": []}, "empty list"),
    ({"prompts": "a single prompt"}, "must be a list"),
    ({"prompts": {"a": 1}}, "must be a list"),
    ({"prompts": iter(["a"])}, "must be a list"),
    ({"input_path": "x.jsonl"}, "output_path is missing"),
    ({"input_path": [], "output_path": "y"}, "input_path"),
    ({"input_path": ["a", " "], "output_path": "y"}, "empty path"),
    ({"input_path": "x.jsonl", "output_path": "x.jsonl"}, "is the input"),
    ({"prompts": ["a"], "endpoint": "/v1/nothing"}, "endpoint"),
    ({"prompts": ["a"], "params": ["temperature"]}, "params"),
    ({"prompts": ["a"], "params": {"temperature": float("nan")}}, "params.temperature is nan"),
    ({"prompts": ["a"], "params": {"stop": {"a"}}}, "params.stop cannot be sent as JSON"),
    ({"prompts": ["a"], "params": {"stream": True}}, "stream"),
    ({"prompts": ["a"], "concurrency": 0}, "concurrency"),
    ({"prompts": ["a"], "concurrency": "many"}, "concurrency"),
    ({"prompts": ["a"], "concurrency": True}, "concurrency"),
    ({"prompts": ["a"], "pack": 0}, "pack"),
    ({"prompts": ["a"], "request_timeout": 0}, "request_timeout"),
    ({"prompts": ["a"], "max_retries": -1}, "max_retries"),
    ({"prompts": ["a"], "max_error_rate": 1.5}, "max_error_rate"),
    ({"prompts": ["a"], "max_errors": -1}, "max_errors"),
    ({"prompts": ["a"], "on_changed_input": "ignore"}, "on_changed_input"),
    ({"prompts": ["a"], "output_schema": 5}, "output_schema"),
    ({"prompts": ["a"], "system_prompt": "x", "endpoint": "embeddings"}, "system_prompt"),
    ({"prompts": ["a"], "model": ""}, "model"),
    ({"prompts": ["a"], "answer_column": "x", "error_column": "x"}, "same name"),
    ({"prompts": ["a"], "answer_column": None}, "answer_column must be text, not None"),
    ({"prompts": ["a"], "error_column": " "}, "error_column must be text"),
    ({"prompts": ["a"], "param_columns": None}, "param_columns must be a list of names, not None"),
    ({"prompts": ["a"], "param_columns": "seed"}, "param_columns must be a list"),
    ({"prompts": ["a"], "param_columns": [1]}, "param_columns must be a list"),
    ({"prompts": ["a"], "extra_roles": 5}, "extra_roles must be a list"),
    (
        {"prompts": ["a"], "output_schema": {}, "endpoint": "score"},
        "output_schema needs an endpoint",
    ),
    ({"prompts": ["a"], "output_path": "x.csv", "output_format": "openai"}, "JSON lines"),
    ({"prompts": ["a"], "output_path": "x.XLSX"}, ".xlsx is not written"),
    ({"prompts": ["a"], "output_path": "x.jsonl.zst"}, ".zst is not written"),
    ({"prompts": ["a"], "output_path": "x.pq", "output_format": "openai"}, "Parquet"),
    ({"prompts": ["a"], "output_path": "x.parquet.gz"}, "Parquet"),
    ({"prompts": ["a"], "input_format": "xml"}, "input_format"),
    ({"prompts": ["a"], "output_path": "a\0b.jsonl"}, "output_path 'a.x00b.jsonl' is not UTF-8"),
    ({"prompts": ["a"], "output_path": "a\udcffb"}, "output_path 'a.udcffb' is not UTF-8"),
    ({"prompts": ["a"], "errors_path": "a\0b"}, "errors_path 'a.x00b' is not UTF-8"),
    ({"input_path": ["a", "a\0b"], "output_path": "y"}, "input_path 'a.x00b' is not UTF-8"),
    ({"input_path": "a\udcff", "output_path": "y"}, "input_path 'a.udcff' is not UTF-8"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_arguments_name_their_field(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        BatchSpec(**arguments)


@pytest.mark.parametrize("name", [field.name for field in fields(BatchSpec)])
def test_an_array_in_any_field_is_refused_in_words(name: str) -> None:
    """It has no truth of its own, and asking for it raises another error."""
    import numpy

    values: list[Any] = [numpy.array([1, 2]), {"stream": numpy.array(["a", "b"])}]
    for value in values[: 1 if name == "output_schema" else 2]:
        arguments: dict[str, Any] = {"prompts": ["a"], name: value}
        with pytest.raises(InvalidInput, match=name):
            BatchSpec(**arguments)


def test_bad_prompts_have_their_own_error() -> None:
    with pytest.raises(InvalidPrompts):
        BatchSpec(prompts=[])


def test_short_names_and_suffixes() -> None:
    assert BatchSpec(prompts=["a"], endpoint="embeddings").endpoint == "/v1/embeddings"
    assert BatchSpec(prompts=["a"], endpoint="chat/completions").endpoint == "/v1/chat/completions"
    assert BatchSpec(prompts=["a"], output_path="s3://b.c/x.csv.gz").form == "columns"
    assert BatchSpec(prompts=["a"], output_path="s3://b.c/x").suffix == ""
    assert BatchSpec(prompts=["a"], output_path="out/day.2026-01-02").form == "openai"
    assert BatchSpec(prompts=["a"], output_path="x.pq").form == "columns"
    assert BatchSpec(prompts=["a"], output_path=Path("x.csv")).output_path == "x.csv"  # type: ignore[arg-type]


def test_the_fingerprint_is_of_what_is_sent() -> None:
    spec = BatchSpec(prompts=["a"])
    same = spec.replace(concurrency=7, max_retries=1, prompts=["b"])
    assert spec.fingerprint("m") == same.fingerprint("m")
    others = [
        spec.replace(params={"temperature": 1}),
        spec.replace(model="lora"),
        spec.replace(system_prompt="x"),
        spec.replace(endpoint="completions"),
        spec.replace(output_schema={"type": "object"}),
    ]
    prints = {other.fingerprint("m") for other in others} | {
        spec.fingerprint("m"),
        spec.fingerprint("n"),
    }
    assert len(prints) == len(others) + 2
