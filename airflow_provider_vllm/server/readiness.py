"""Is it ready? A server's state goes in, an Outcome comes out; one loop waits for it.

`decide` is pure, so that operator, sensor and (later) trigger judge alike. It asks "did it die?" before "is it
ready?".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from airflow_provider_vllm.diagnosis.rule import Diagnosis
from airflow_provider_vllm.exceptions import NoFreeGpu, ServerError, ServerLost, StartFailed
from airflow_provider_vllm.server import state
from airflow_provider_vllm.server.state import ServerState

WAIT, IS_READY, HAS_FAILED = "wait", "ready", "failed"
POLL_S = 0.25
# How long a failed server may take to write its diagnosis before it is reported without one.
SETTLE_S = 20.0
REPORT_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """`verdict` is WAIT, IS_READY or HAS_FAILED; `message` says what is going on in a sentence."""

    verdict: str
    message: str


def decide(current: ServerState, *, supervisor_alive: bool, now: float) -> Outcome:
    """What the state means at `now` (seconds since the epoch). `supervisor_alive` is True for other hosts' servers
    that answer."""
    if current.state in state.ENDED_STATES:
        if not current.settled and supervisor_alive and now - (current.ended_at or now) < SETTLE_S:
            return Outcome(WAIT, f"failed ({current.message}); collecting evidence")
        return Outcome(HAS_FAILED, current.message or f"the server is {current.state}")
    if not supervisor_alive:
        return Outcome(HAS_FAILED, "the supervisor of the server is gone")
    if current.state == state.DRAINING:
        return Outcome(HAS_FAILED, current.message or "the server is being stopped")
    if current.state == state.READY:
        took = (current.ready_at or now) - current.started_at
        return Outcome(
            IS_READY, f"{current.model} is ready at {current.base_url} after {took:.1f} s"
        )
    stage = current.stage or current.state
    progress = f" {current.progress}" if current.progress else ""
    return Outcome(
        WAIT,
        f"{stage}{progress}: {now - (current.stage_since or current.started_at):.0f} s in this stage, "
        f"{now - current.started_at:.0f} s in all",
    )


def wait_until_ready(
    look: Callable[[], tuple[ServerState, bool]],
    *,
    timeout: float,
    report: Callable[[str], None],
    renew: Callable[[], None] = lambda: None,
    fail: Callable[[ServerState, str], ServerError],
) -> ServerState:
    """Wait for a server to become ready; its state.

    `look` returns the state and whether its supervisor lives; `report` gets a line at each change of
    stage and every 10 s; `fail` makes the error of a failed start. Raises what `fail` makes, and that also
    after `timeout` seconds.
    """
    began = reported = time.monotonic()
    stage: str | None = None
    while True:
        current, alive = look()
        outcome = decide(current, supervisor_alive=alive, now=time.time())
        if outcome.verdict == IS_READY:
            report(outcome.message)
            return current
        if outcome.verdict == HAS_FAILED:
            raise fail(current, outcome.message)
        now = time.monotonic()
        if now - began > timeout:
            raise fail(current, f"not ready after {timeout:g} s")
        if current.stage != stage or now - reported > REPORT_S:
            stage, reported = current.stage, now
            report(outcome.message)
            renew()
        time.sleep(POLL_S)


def start_error(current: ServerState, message: str, log_path: str, tail: str) -> ServerError:
    """The error of a start that failed: exit status, stage, log path, diagnosis, tail of the log.

    A start that was stopped by somebody, or superseded by a newer one, is a ServerLost: another attempt would
    work against whoever wanted that.
    """
    if current.reason == "no_gpu":
        return NoFreeGpu(message)
    if current.state in (state.STOPPED, state.DRAINING):
        return ServerLost(
            f"The server {current.server_id} was stopped while it started: {message}. Its log on "
            f"{current.host} is {log_path}. See who stopped it; clear the task to start it again."
        )
    lines = [f"vLLM did not become ready: {message.rstrip('.')}."]
    diagnosis = dict(current.diagnosis) if current.diagnosis else None
    lines.append(
        f"Exit status: {current.exit_status}, stage: {current.stage or current.state}, "
        f"log on {current.host}: {log_path}"
    )
    if tail:
        lines.append(f"End of the log:\n{tail}")
    if diagnosis:
        # Last, since the end of the task's log is what people read.
        lines.append(Diagnosis.from_json(diagnosis).short())
    return StartFailed(
        "\n".join(lines),
        exit_status=current.exit_status,
        stage=current.stage,
        log_path=log_path,
        diagnosis=diagnosis,
        report=current.report,
    )
