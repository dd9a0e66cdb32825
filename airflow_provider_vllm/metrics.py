"""vLLM's /metrics: Prometheus text goes in, its samples by full name come out.

Read by the supervisor (does anything move?), by the batch (is it stalled, how full is it?) and by the advice on
settings after a batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(rb"^(vllm:[a-z0-9_]+(?:\{.*\})?) +([0-9.eE+-]+|[+-]?Inf)", re.MULTILINE)
# What moves only when tokens do. "Requests running" does not count: a frozen engine keeps them.
MOVING = ("generation_tokens", "prompt_tokens", "request_success")


def read(text: bytes) -> dict[str, float]:
    """vLLM's samples by full name, labels included (`vllm:num_requests_running{engine="0"}`)."""
    return {name.decode(errors="replace"): float(value) for name, value in _SAMPLE.findall(text)}


def total(samples: Mapping[str, float], name: str) -> float | None:
    """The sum of a metric (without `vllm:` and `_total`) over its labels; None where there is none."""
    wanted = (f"vllm:{name}", f"vllm:{name}_total")
    found = [value for full, value in samples.items() if full.partition("{")[0] in wanted]
    return sum(found) if found else None


def moved(samples: Mapping[str, float]) -> float | None:
    """The sum of the counters that grow only while the engine works; None where there are none."""
    found = [value for name in MOVING if (value := total(samples, name)) is not None]
    return sum(found) if found else None
