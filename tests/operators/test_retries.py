"""`retries` is 2 where nothing else says otherwise, and the retry policy comes with it."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_provider_vllm import (
    StartVllmServerOperator,
    StopVllmServerOperator,
    VllmBatchOperator,
    VllmRetryPolicy,
)
from tests.server.conftest import fake_spec

OPERATORS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (StartVllmServerOperator, {}, {"spec": [fake_spec().to_json()]}),
    (StopVllmServerOperator, {}, {"server": [{}]}),
    (VllmBatchOperator, {"spec": fake_spec().to_json()}, {"prompts": [["x"]]}),
]
IDS = [operator.__name__ for operator, _, _ in OPERATORS]


def made(
    operator: Any, fixed: dict[str, Any], varied: dict[str, Any], *, mapped: bool, **more: Any
) -> Any:
    with DAG("d", schedule=None, default_args=more.pop("default_args", {})):
        if mapped:
            return operator.partial(task_id="t", **fixed, **more).expand(**varied)
        first = {name: values[0] for name, values in varied.items()}
        return operator(task_id="t", **fixed, **first, **more)


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "mapped"])
@pytest.mark.parametrize(("operator", "fixed", "varied"), OPERATORS, ids=IDS)
class TestRetries:
    def test_two_by_default(self, operator: Any, fixed: Any, varied: Any, mapped: bool) -> None:
        assert made(operator, fixed, varied, mapped=mapped).retries == 2

    def test_default_args_win(self, operator: Any, fixed: Any, varied: Any, mapped: bool) -> None:
        task = made(operator, fixed, varied, mapped=mapped, default_args={"retries": 5})
        assert task.retries == 5

    def test_the_task_wins(self, operator: Any, fixed: Any, varied: Any, mapped: bool) -> None:
        task = made(operator, fixed, varied, mapped=mapped, default_args={"retries": 5}, retries=0)
        assert task.retries == 0


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "mapped"])
@pytest.mark.parametrize(
    ("operator", "fixed", "varied"), [OPERATORS[0], OPERATORS[2]], ids=[IDS[0], IDS[2]]
)
def test_the_retry_policy(operator: Any, fixed: Any, varied: Any, mapped: bool) -> None:
    task = made(operator, fixed, varied, mapped=mapped)
    assert isinstance(task.retry_policy, VllmRetryPolicy)
    assert task.retry_policy.fail_fast is False
    own = VllmRetryPolicy(fail_fast=True)
    assert made(operator, fixed, varied, mapped=mapped, retry_policy=own).retry_policy is own
    assert made(operator, fixed, varied, mapped=mapped, retry_policy=None).retry_policy is None
