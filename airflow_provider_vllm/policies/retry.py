"""Whether and when a failed task is tried again: a diagnosis goes in, a RetryDecision comes out.

Airflow asks in the worker, with the exception at hand; the reason is stored on the task instance. The
policy shortens or lengthens the delay; it never retries beyond the task's `retries`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import RetryAction, RetryDecision, RetryPolicy

from airflow_provider_vllm.exceptions import (
    DownloadFailed,
    InvalidInput,
    TooManyErrors,
    server_failure,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

MAX_REASON = 500
OWN = "the task's own retries and retry_delay"

log = logging.getLogger(__name__)


class VllmRetryPolicy(RetryPolicy):
    """Retry with a delay that fits the diagnosis.

    :param fail_fast: fail at once where no retry can help: the diagnosis says so of the launch, a field
        or file of the task is wrong, or the hub has no such model for this account.
    """

    def __init__(self, fail_fast: bool = False) -> None:
        self.fail_fast = fail_fast

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Context | None = None,
    ) -> RetryDecision:
        decision = self._decide(exception, try_number)
        if decision.action is RetryAction.FAIL or try_number <= max_tries:
            log.info("VllmRetryPolicy: %s (%s)", decision.action.value, decision.reason or OWN)
        else:
            log.info("VllmRetryPolicy: this was the last try (%s)", decision.reason or OWN)
            return decision
        if decision.action is not RetryAction.FAIL and is_lasting(exception):
            log.info("The next try will meet the same; fail_fast=True would fail at once")
        return decision

    def _decide(self, exception: BaseException, try_number: int) -> RetryDecision:
        failure = server_failure(exception)
        if failure is None or not failure.diagnosis:
            return self._without_diagnosis(exception)
        diagnosis = failure.diagnosis
        cause = diagnosis.get("cause", "unknown")
        reason = f"{cause}: {diagnosis.get('explanation', '')} Next step: {diagnosis.get('first_action', '')}"[
            :MAX_REASON
        ]
        if self.fail_fast and no_launch_helps(diagnosis):
            return RetryDecision.fail(reason=reason)
        return RetryDecision.retry(delay=delay_for(diagnosis, try_number), reason=reason)

    def _without_diagnosis(self, exception: BaseException) -> RetryDecision:
        lasting = lasting_error(exception)
        if not self.fail_fast or lasting is None:
            return RetryDecision.default()
        return RetryDecision.fail(reason=f"{type(lasting).__name__}: {lasting}"[:MAX_REASON])

    def serialize(self) -> dict[str, Any]:
        return {"fail_fast": self.fail_fast}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> VllmRetryPolicy:
        return cls(**data)


def is_lasting(error: BaseException) -> bool:
    """Whether the next try will meet the same."""
    failure = server_failure(error)
    if failure is not None and failure.diagnosis:
        return no_launch_helps(failure.diagnosis)
    return lasting_error(error) is not None


def no_launch_helps(diagnosis: Mapping[str, Any]) -> bool:
    return bool(diagnosis.get("retry", {}).get("launch") is False)


def lasting_error(error: BaseException | None) -> BaseException | None:
    """What in this chain of errors will be there again at the next try; None where nothing is."""
    while error is not None:
        if isinstance(error, InvalidInput):
            return error
        if isinstance(error, DownloadFailed) and not error.transient:
            return error
        if isinstance(error, TooManyErrors) and error.is_lasting:
            return error
        error = error.__cause__
    return None


def delay_for(diagnosis: Mapping[str, Any], try_number: int) -> timedelta | None:
    """The delay that fits the cause; None leaves it to the task. Pure."""
    base = _DELAYS.get(str(diagnosis.get("cause"))) or _GROUP_DELAYS.get(
        str(diagnosis.get("group"))
    )
    if base is None:
        return None
    return min(base * 2 ** max(0, try_number - 1), timedelta(hours=1))


# First delay by cause, doubled with each try. What holds GPU memory or a hub's quota needs minutes to
# go away; a port or a crashed process is free again at once.
_DELAYS = {
    "port_in_use": timedelta(seconds=5),
    "profiling_disturbed": timedelta(seconds=30),
    "cpu_memory_below_requested": timedelta(minutes=2),
    "free_memory_below_requested": timedelta(minutes=2),
    "cuda_oom": timedelta(minutes=2),
    "cuda_oom_kv_cache": timedelta(minutes=2),
    "ray_gpu_placement": timedelta(minutes=2),
    "hub_unreachable": timedelta(minutes=1),
    "rate_limited": timedelta(minutes=5),
}
_GROUP_DELAYS = {
    "dead_process": timedelta(seconds=15),
    "communication": timedelta(seconds=30),
    "kernel_hardware": timedelta(minutes=1),
}
