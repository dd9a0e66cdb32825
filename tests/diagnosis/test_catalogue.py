"""The whole catalogue over all its examples and near misses."""

from __future__ import annotations

import gzip
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.diagnosis.catalogue import RULES, by_id
from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.diagnosis.rule import GROUPS, Diagnosis, Rule
from airflow_provider_vllm.diagnosis.template import NAME, always_needed

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
LOGS = Path(__file__).parent / "logs"

EXAMPLES = [(rule, text) for rule in RULES for text in rule.examples]
NEAR_MISSES = [(rule, text) for rule in RULES for text in rule.near_misses]


# What `details` of a rule adds to the groups of its pattern.
DETAILS = {"argument_value_refused": {"reason"}, "invalid_cli_argument": {"nearest"}}


def assert_whole(found: Diagnosis) -> None:
    """No sentence shows a gap where its log told nothing."""
    for sentence in (found.explanation, found.first_action):
        assert not re.search(r"[{}?]|\[[:, (]| \(\)|  | [.,;](?!\.)|[:,][.;]", sentence), sentence


def _name(value: object) -> str:
    return value.id if isinstance(value, Rule) else ""


@pytest.mark.parametrize(("rule", "text"), EXAMPLES, ids=_name)
def test_an_example_comes_to_its_rule(rule: Rule, text: str) -> None:
    found = diagnose(text.split("\n"))
    assert found.cause == rule.id
    assert found.group == rule.group
    assert found.verdict == ("interrupted" if rule.interrupts else "failed")
    assert found.root_line is not None
    assert found.root_line in text
    assert_whole(found)
    assert found.retry_launch is rule.launch


@pytest.mark.parametrize(("rule", "text"), NEAR_MISSES, ids=_name)
def test_a_near_miss_does_not(rule: Rule, text: str) -> None:
    assert diagnose(text.split("\n")).cause != rule.id


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log.gz")), ids=lambda path: path.name)
def test_a_log_comes_to_whole_sentences(path: Path) -> None:
    assert_whole(diagnose(gzip.decompress(path.read_bytes()).decode().split("\n")))


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_a_sentence_needs_nothing_that_its_pattern_may_not_find(rule: Rule) -> None:
    found = always_found(_parser.parse(rule.pattern))
    given = {name for name, number in rule.compiled.groupindex.items() if number in found}
    for sentence in (rule.explanation, rule.first_action):
        assert always_needed(sentence) <= given
        known = set(rule.compiled.groupindex) | DETAILS.get(rule.id, set())
        assert set(NAME.findall(sentence)) <= known


def always_found(pattern: Any) -> set[int]:
    """The groups that hold at least a character in every match of a parsed pattern."""
    found: set[int] = set()
    for op, value in pattern:
        if str(op) == "SUBPATTERN":
            found |= always_found(value[-1])
            if value[0] and value[-1].getwidth()[0]:
                found.add(value[0])
        elif str(op) == "BRANCH":
            found |= set.intersection(*map(always_found, value[1]))
        elif str(op) in ("MAX_REPEAT", "MIN_REPEAT") and value[0]:
            found |= always_found(value[2])
    return found


def test_ids_are_unique_and_every_rule_is_complete() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.examples, rule.id
        assert rule.group in GROUPS
        assert 0 < rule.confidence <= 1
        assert rule.explanation.endswith((".", "}")), rule.id
        assert rule.first_action.endswith("."), rule.id
        assert by_id(rule.id) is rule


def test_an_unknown_id_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        by_id("no_such_rule")


CPU_MEMORY = (
    "ValueError: Available memory on node 0 (20.68/23.54 GiB) on startup is less than desired CPU memory "
    "utilization (0.92, 21.66 GiB)."
)
USAGE = "usage: api_server.py [-h] [--max-model-len MAX_MODEL_LEN] [--max-num-seqs MAX_NUM_SEQS]"


def test_the_memory_of_a_cpu_server() -> None:
    found = diagnose([CPU_MEMORY])
    assert "of the 23.54 GiB of node 0, which is 21.66 GiB, and only 20.68 GiB" in found.explanation
    assert "GPU" not in found.explanation + found.first_action
    assert found.remedy == {"gpu_memory_utilization": 0.5}
    fuller = diagnose([CPU_MEMORY.replace("20.68", "8.00")])
    assert fuller.remedy == {"gpu_memory_utilization": 0.33}


def test_the_nearest_argument_is_named_where_the_usage_text_lists_one() -> None:
    error = "api_server.py: error: unrecognized arguments: "
    found = diagnose([USAGE, f"{error}--max-modellen 4096"])
    assert "--max-modellen" in found.explanation
    assert "the nearest this vLLM knows is max_model_len" in found.first_action
    assert "nearest" not in diagnose([USAGE, f"{error}--no-such-arg"]).first_action
    assert "nearest" not in diagnose([f"{error}--max-modellen 4096"]).first_action


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["--dtype: invalid choice: 'fp4' (choose from auto, half)"],
            "dtype: invalid choice: 'fp4' (choose from auto, half).",
        ),
        (
            [
                "--compilation-config/-cc: 1 validation error for CompilationConfig",
                "  Value error, it is for others only. [type=value_error, input_value={'a': 1}]",
                "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
            ],
            "compilation_config: it is for others only.",
        ),
        (
            [
                "--compilation-config/-cc: 1 validation error for CompilationConfig",
                "no_such_field",
                "  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=1]",
            ],
            "compilation_config: no_such_field: Unexpected keyword argument.",
        ),
        (
            ["--compilation-config/-cc: 1 validation error for CompilationConfig"],
            "compilation_config: 1 validation error for CompilationConfig.",
        ),
    ],
)
def test_why_a_value_is_refused(lines: list[str], reason: str) -> None:
    first, *more = lines
    found = diagnose([USAGE, f"api_server.py: error: argument {first}", *more])
    assert found.cause == "argument_value_refused"
    assert found.explanation == f"vLLM refuses the value of {reason}"
