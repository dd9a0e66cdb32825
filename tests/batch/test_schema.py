"""A schema that can check nothing is refused before the start; no answer ends the batch that it is checked in."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, create_model, field_validator

from airflow_provider_vllm.batch.check import check_inputs
from airflow_provider_vllm.batch.schema import checker
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidInput
from tests.batch.helpers import ForeignLink, read_rows, run

NOWHERE = {"$ref": "#/$defs/nope"}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        *[({"properties": {name: NOWHERE}}, "nope leads nowhere") for name in
          ("default", "enum", "examples", "const", "$ref")],
        ({"$defs": {"default": NOWHERE}}, "leads nowhere"),
        ({"dependentSchemas": {"const": NOWHERE}}, "leads nowhere"),
        ({"items": {"$dynamicRef": "#nope"}}, r"\$dynamicRef #nope leads nowhere"),
        ({"$id": "http://a/b", "$ref": "c"}, "leads nowhere"),
        ({"type": "object", "allOf": [{"$ref": "#"}]}, "leads nowhere"),
        ({"$schema": DRAFT_4, "properties": {"a": {"$ref": "#/no"}}}, "leads nowhere"),
        ({"$schema": ["x"]}, "not a JSON schema"),
        ({"pattern": "("}, "not a JSON schema"),
        (deep(200), "not a JSON schema: RecursionError"),
        (deep(3000), "cannot be sent as JSON"),
        ({"maximum": 10**400}, "cannot be sent as JSON"),
        ({"enum": [{1}]}, "cannot be sent as JSON"),
        (create_model("Odd", a=(Callable[[], int], ...)), "makes no JSON schema"),
    ],
)  # fmt: skip
def test_what_can_check_nothing_is_refused(schema: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_inputs(BatchSpec(prompts=["a"], output_schema=schema))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"$ref": {"type": "string"}}}, '{"$ref": "a"}', '{"$ref": 1}'),
        ({"enum": [NOWHERE]}, '{"$ref": "#/$defs/nope"}', "1"),
        ({"default": NOWHERE, "type": "integer"}, "1", '"a"'),
        # relative to the id of the schema that it stands in
        (
            {
                "$defs": {
                    "list": {
                        "$id": "http://a/list",
                        "$defs": {"item": {"type": "integer"}},
                        "items": {"$ref": "#/$defs/item"},
                    }
                },
                "$ref": "http://a/list",
            },
            "[1]",
            '["a"]',
        ),
    ],
)
def test_what_only_looks_like_a_reference(schema: Any, good: str, bad: str) -> None:
    check = checker(schema)
    assert check is not None
    assert check(good) is None
    assert check(bad) is not None


def lookup(cls: type, number: int) -> int:
    return {1: 1}[number]


TREE = {"type": "object", "additionalProperties": {"$ref": "#"}}
PICKY: type[BaseModel] = create_model(
    "Picky", a=(int, ...), __validators__={"lookup": field_validator("a")(lookup)}
)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [(TREE, '{"a": {}}', '{"a":' * 300 + "{}" + "}" * 300), (PICKY, '{"a": 1}', '{"a": 2}')],
)
def test_an_answer_that_a_check_stumbles_over_is_an_invalid_output(
    link: ForeignLink, tmp_path: Path, schema: Any, good: str, bad: str
) -> None:
    spec = BatchSpec(
        prompts=[f"[[say {good}]]", f"[[say {bad}]]", f"[[say {good}]]"],
        output_path=str(tmp_path / "out.jsonl"),
        output_schema=schema,
        max_error_rate=1,
    )
    manifest = run(spec, link, tmp_path).manifest
    assert manifest.outcomes == {"invalid_output": 1, "ok": 2}
    (row,) = read_rows(Path(str(manifest.errors_path)))
    assert row["response"]["body"]["choices"][0]["message"]["content"] == bad
    assert row["error"]["message"].startswith("output_schema could not be checked: ")


def test_a_pattern_that_finds_no_end_costs_its_row_a_second(
    link: ForeignLink, tmp_path: Path
) -> None:
    """Each more a makes it half as slow again. In the task's process nothing could interrupt it."""
    schema = {"type": "object", "properties": {"a": {"pattern": "^(a|aa)+$"}}}
    prompts = [f'[[say {{"a": "{text}"}}]]' for text in ("aa", "ab", "a" * 60 + "!", "aaaa")]
    began = time.monotonic()
    spec = BatchSpec(prompts=prompts, output_schema=schema, max_error_rate=1)
    result = run(spec, link, tmp_path)
    assert time.monotonic() - began < 10
    assert result.manifest.outcomes == {"invalid_output": 2, "ok": 2}
    assert result.errors is not None
    assert [error["row"] for error in result.errors] == [1, 2]
    assert "'ab' does not match '^(a|aa)+$'" in result.errors[0]["message"]
    assert "'^(a|aa)+$' finds no end" in result.errors[1]["message"]


@pytest.mark.parametrize("pack", [1, 4])
def test_answers_that_break_the_schema_count_their_tokens_and_their_cuts(
    link: ForeignLink, tmp_path: Path, pack: int
) -> None:
    """They were generated all the same; a pack's sum stands with its first answer, good or not."""
    prompts = ["[[cut {]]", "[[say {}]]", "[[cut {]]", "[[say 5]]"]
    spec = BatchSpec(prompts=prompts, output_schema={"type": "object"}, max_error_rate=1, pack=pack)
    manifest = run(spec, link, tmp_path).manifest
    assert manifest.outcomes == {"invalid_output": 3, "ok": 1}
    assert manifest.completion_tokens == 4 * 8
    assert manifest.prompt_tokens > 4
    assert manifest.cut_off == 2
