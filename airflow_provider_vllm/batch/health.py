"""A server's vital signs in, "alive", "dead" or "frozen" out.

`look` reads what a server tells of itself, `is_stalled` decides without side effects, and `probe` asks
for one token, the only sign of life that a frozen engine cannot give: its health, model list and
metrics stay good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from airflow_provider_vllm import metrics
from airflow_provider_vllm.batch.api import PROBES
from airflow_provider_vllm.batch.client import request
from airflow_provider_vllm.batch.endpoint import Endpoint

LOOK_TIMEOUT = 5.0


@dataclass(frozen=True)
class Vitals:
    """vLLM's own counters; None where the server has no such metrics."""

    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    moved: float | None = None  # sum of counters that grow with every step of the engine
    samples: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)


def is_healthy(endpoint: Endpoint) -> str | None:
    """None for a server that answers, else what it said instead."""
    status, body = request(endpoint, "/health", LOOK_TIMEOUT)
    if status == 404:  # not vLLM: any answer to the model list is a sign of life
        status, body = request(endpoint, "/v1/models", LOOK_TIMEOUT)
    if status == 0:
        return body.decode("utf-8", "replace")
    return f"/health says HTTP {status}" if status >= 500 else None


def look(endpoint: Endpoint, timeout: float = LOOK_TIMEOUT) -> Vitals:
    """The metrics of a vLLM server; empty Vitals for any other."""
    status, body = request(endpoint, "/metrics", timeout)
    return read_metrics(body) if status == 200 else Vitals()


def read_metrics(text: bytes) -> Vitals:
    """Vital signs in Prometheus' text form, summed over engines."""
    samples = metrics.read(text)

    def whole(name: str) -> int | None:
        value = metrics.total(samples, name)
        return None if value is None else int(value)

    return Vitals(
        whole("num_requests_running"),
        whole("num_requests_waiting"),
        whole("num_preemptions"),
        metrics.moved(samples),
        samples,
    )


def is_vllm(endpoint: Endpoint) -> bool:
    """Whether the server says that it is vLLM."""
    status, body = request(endpoint, "/v1/models", LOOK_TIMEOUT)
    if status != 200:
        return False
    try:
        models = orjson.loads(body)["data"]
        return any(model.get("owned_by") == "vllm" for model in models)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return False


def probe(endpoint: Endpoint, url: str, model: str, deadline: float) -> str | None:
    """None when the server answers a one-token request before the deadline, else what happened."""
    body = orjson.dumps({"model": model, **PROBES[url]})
    status, said = request(endpoint, url, deadline, body)
    if status == 0:
        return said.decode("utf-8", "replace")
    if status == 503 and is_healthy(endpoint) is None:
        return None  # it has too much to do
    return f"HTTP {status}" if status >= 500 else None


@dataclass(frozen=True)
class Movement:
    """When something last moved (monotonic seconds), and the numbers that were seen then."""

    at: float
    done: int
    moved: float | None


def observe(
    last: Movement, *, done: int, in_flight: int, moved: float | None, now: float
) -> Movement:
    """The new state after a look: any change of a number, or nothing to do, counts as movement."""
    if in_flight == 0 or done != last.done or (moved is not None and moved != last.moved):
        return Movement(now, done, moved)
    return last


def is_stalled(last: Movement, *, now: float, patience: float) -> bool:
    """Whether a probe is due."""
    return now - last.at >= patience
