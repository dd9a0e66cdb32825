"""VllmRetryPolicy: a diagnosis in, a decision with a fitting delay and its reason out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import RetryAction

from airflow_provider_vllm import VllmRetryPolicy
from airflow_provider_vllm.diagnosis.catalogue import RULES
from airflow_provider_vllm.exceptions import (
    BatchFailed,
    DownloadFailed,
    InvalidHandle,
    InvalidInput,
    InvalidPrompts,
    InvalidSpec,
    NoFreeGpu,
    PreflightFailed,
    ServerLost,
    StartFailed,
    TooManyErrors,
    UnsendableRows,
)
from airflow_provider_vllm.policies.retry import _DELAYS, MAX_REASON, delay_for
from airflow_provider_vllm.server.preflight import Finding, enforce


def diagnosis(cause: str = "some_cause", group: str = "capacity", *, launch: bool = True) -> dict:
    return {
        "cause": cause,
        "group": group,
        "explanation": "It has no memory.",
        "first_action": "Give it some.",
        "retry": {"launch": launch, "request": None},
    }


def decide(error: BaseException, *, fail_fast: bool = False, try_number: int = 1) -> Any:
    return VllmRetryPolicy(fail_fast).evaluate(error, try_number, 3)


def test_an_error_without_a_diagnosis_is_left_to_airflow() -> None:
    assert decide(ValueError("x")).action == RetryAction.DEFAULT
    assert decide(StartFailed("x")).action == RetryAction.DEFAULT
    assert decide(ValueError("x"), fail_fast=True).action == RetryAction.DEFAULT


@pytest.mark.parametrize(
    ("error", "hint"), [(InvalidPrompts("no such file"), True), (ValueError("x"), False)]
)
def test_the_log_says_what_a_retry_will_meet(
    error: Exception, hint: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert decide(error).action is RetryAction.DEFAULT
    assert "default (the task's own retries and retry_delay)" in caplog.text
    assert ("fail_fast=True would fail at once" in caplog.text) is hint


def test_of_the_last_try_nothing_is_promised(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    decide(InvalidPrompts("no such file"), try_number=4)
    assert "this was the last try" in caplog.text
    assert "next try" not in caplog.text


def test_a_diagnosis_that_no_launch_can_help_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    decide(StartFailed("x", diagnosis=diagnosis(launch=False)))
    assert "The next try will meet the same" in caplog.text


def rows_failed(**outcomes: int) -> TooManyErrors:
    return TooManyErrors("too many rows failed", manifest={"outcomes": outcomes})


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (rows_failed(ok=5, rejected=7, failed=0), True),
        (rows_failed(invalid_input=1, rejected=7), True),
        (rows_failed(rejected=7, failed=1), False),
        (rows_failed(invalid_output=7), False),
        (TooManyErrors("x"), False),
    ],
)
def test_rows_that_are_wrong_in_themselves_fail_again(error: TooManyErrors, lasting: bool) -> None:
    expected = RetryAction.FAIL if lasting else RetryAction.DEFAULT
    assert decide(error, fail_fast=True).action is expected
    assert decide(error).action is RetryAction.DEFAULT


def test_the_reason_is_the_diagnosis() -> None:
    decision = decide(StartFailed("x", diagnosis=diagnosis()))
    assert decision.action == RetryAction.RETRY
    assert decision.reason == "some_cause: It has no memory. Next step: Give it some."
    assert decision.retry_delay is None, "no delay of ours: the task's own stands"


def test_a_long_reason_is_cut_to_what_airflow_stores() -> None:
    long = {**diagnosis(), "explanation": "x" * 1000}
    assert len(decide(StartFailed("x", diagnosis=long)).reason) == MAX_REASON


def test_a_batch_that_lost_its_server_has_the_servers_diagnosis() -> None:
    lost = ServerLost("gone", diagnosis=diagnosis(group="dead_process"))
    middle = BatchFailed("did not come back")
    middle.__cause__ = lost
    error = BatchFailed("failed; 3 answers are kept")
    error.__cause__ = middle
    assert decide(error).retry_delay == timedelta(seconds=15)


@pytest.mark.parametrize("launch", [True, False])
@pytest.mark.parametrize("fail_fast", [True, False])
def test_fail_fast_gives_up_only_where_no_launch_can_help(launch: bool, fail_fast: bool) -> None:
    error = StartFailed("x", diagnosis=diagnosis(launch=launch))
    expected = RetryAction.FAIL if fail_fast and not launch else RetryAction.RETRY
    decision = decide(error, fail_fast=fail_fast)
    assert decision.action == expected
    assert "It has no memory." in decision.reason


@pytest.mark.parametrize(
    "error",
    [
        InvalidSpec("ServerSpec.port: 70000 is no port"),
        InvalidHandle("no handle of ours"),
        InvalidPrompts("/data/none.jsonl: no such file"),
        InvalidInput("the output is the input"),
        UnsendableRows("7 of 30 rows failed"),
        DownloadFailed("no such model"),
    ],
)
def test_fail_fast_gives_up_on_what_the_next_try_will_find_again(error: Exception) -> None:
    decision = decide(error, fail_fast=True)
    assert decision.action == RetryAction.FAIL
    assert decision.reason == f"{type(error).__name__}: {error}"
    assert decide(error).action == RetryAction.DEFAULT, "without fail_fast Airflow decides"

    wrapped = BatchFailed("did not begin")
    wrapped.__cause__ = error
    assert decide(wrapped, fail_fast=True).action == RetryAction.FAIL


def test_fail_fast_does_not_give_up_on_what_passes() -> None:
    assert decide(DownloadFailed("x", transient=True), fail_fast=True).action == RetryAction.DEFAULT
    assert decide(NoFreeGpu("all are taken"), fail_fast=True).action == RetryAction.DEFAULT
    long = InvalidSpec("x" * 1000)
    assert len(decide(long, fail_fast=True).reason) == MAX_REASON


def test_delays_double_up_to_an_hour() -> None:
    found = diagnosis("cuda_oom")
    delays = [delay_for(found, number) for number in (1, 2, 3, 20)]
    assert delays == [timedelta(minutes=m) for m in (2, 4, 8, 60)]


def test_the_delay_of_a_cause_wins_over_that_of_its_group() -> None:
    assert delay_for(diagnosis("rate_limited", "dead_process"), 1) == timedelta(minutes=5)


def test_each_delay_is_for_a_cause_of_the_catalogue() -> None:
    assert set(_DELAYS) <= {rule.id for rule in RULES}


def test_it_survives_airflows_serialization() -> None:
    policy = VllmRetryPolicy(fail_fast=True)
    assert VllmRetryPolicy.deserialize(policy.serialize()).fail_fast is True


@pytest.mark.parametrize(("passes", "action"), [(False, "fail"), (True, "retry")])
def test_what_a_check_before_the_start_found(
    passes: bool, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    findings = [
        Finding("port", "error", "It is taken.", "Take another.", passes=True),
        Finding("memory", "error", "None is left.", "Give some.", passes=passes),
    ]
    with pytest.raises(PreflightFailed) as caught:
        enforce(findings, "fail")
    with caplog.at_level("INFO"):
        decision = decide(caught.value, fail_fast=True)
    assert decision.action.value == action
    assert f"VllmRetryPolicy: {action} (" in caplog.text
    assert decide(caught.value).action == RetryAction.RETRY
    if not passes:
        assert decision.reason == "preflight_memory: None is left. Next step: Give some."
