"""The whole catalogue over all its examples and near misses."""

from __future__ import annotations

import pytest

from airflow_provider_vllm.diagnosis.catalogue import RULES, by_id
from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.diagnosis.rule import GROUPS, Rule

EXAMPLES = [(rule, text) for rule in RULES for text in rule.examples]
NEAR_MISSES = [(rule, text) for rule in RULES for text in rule.near_misses]


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
    assert "{" not in found.explanation
    assert found.retry_launch is rule.launch


@pytest.mark.parametrize(("rule", "text"), NEAR_MISSES, ids=_name)
def test_a_near_miss_does_not(rule: Rule, text: str) -> None:
    assert diagnose(text.split("\n")).cause != rule.id


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
