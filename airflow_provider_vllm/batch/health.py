"""A server's vital signs in, "alive", "dead" or "frozen" out.

`look` reads what a server tells of itself, `is_stalled` decides without side effects, and `probe` asks
for one token, the only sign of life that a frozen engine cannot give: its health, model list and
metrics stay good.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson

from airflow_provider_vllm.batch.api import PROBES
from airflow_provider_vllm.batch.client import request
from airflow_provider_vllm.batch.endpoint import Endpoint

LOOK_TIMEOUT = 5.0
METRIC = re.compile(rb"^vllm:([a-z_]+?)(?:_total)?(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)
MOVING = ("generation_tokens", "prompt_tokens", "request_success")


@dataclass(frozen=True)
class Vitals:
    """vLLM's own counters; None where the server has no such metrics."""

    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    moved: float | None = None  # sum of counters that grow with every step of the engine


def is_healthy(endpoint: Endpoint) -> str | None:
    """None for a server that answers, else what it said instead."""
    status, body = request(endpoint, "/health", LOOK_TIMEOUT)
    if status == 404:  # not vLLM: any answer to the model list is a sign of life
        status, body = request(endpoint, "/v1/models", LOOK_TIMEOUT)
    if status == 0:
        return body.decode("utf-8", "replace")
    return f"/health says HTTP {status}" if status >= 500 else None


def look(endpoint: Endpoint) -> Vitals:
    """The metrics of a vLLM server; empty Vitals for any other."""
    status, body = request(endpoint, "/metrics", LOOK_TIMEOUT)
    return read_metrics(body) if status == 200 else Vitals()


def read_metrics(text: bytes) -> Vitals:
    """Vital signs in Prometheus' text form, summed over engines."""
    sums: dict[str, float] = {}
    for name, value in METRIC.findall(text):
        sums[name.decode()] = sums.get(name.decode(), 0.0) + float(value)

    def whole(name: str) -> int | None:
        return int(sums[name]) if name in sums else None

    moved = sum(sums.get(name, 0.0) for name in MOVING) if "generation_tokens" in sums else None
    return Vitals(
        whole("num_requests_running"),
        whole("num_requests_waiting"),
        whole("num_preemptions"),
        moved,
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
