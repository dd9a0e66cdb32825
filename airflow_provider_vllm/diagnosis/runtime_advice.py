"""Two readings of vLLM's /metrics in; advice on its settings out. Pure.

A reading maps a sample's full name, as in the text format (`vllm:num_preemptions_total` or with its
labels `vllm:num_preemptions_total{engine="0"}`), to its value; samples that differ only in labels
are summed (of gauges in percent the largest counts). Metrics of other releases that are missing give
no advice, never an error. Names: vLLM v1/metrics/loggers.py, 0.8 to 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FULL = 0.9
"""KV cache usage from which on preemptions mean that too many sequences run at once."""
ROOM = 0.5
LOW_HITS = 0.1
MANY_QUERIES = 10_000

_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:cpu_cache_usage_perc")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")


@dataclass(frozen=True)
class Advice:
    """`id` is stable, `text` is for people, `measured` holds the numbers that it rests on."""

    id: str
    text: str
    measured: Mapping[str, float]

    def to_json(self) -> dict[str, object]:
        """Plain JSON values."""
        return {"id": self.id, "text": self.text, "measured": dict(self.measured)}


def advise(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    peak: Mapping[str, float] | None = None,
) -> tuple[Advice, ...]:
    """Advice from the readings before and after a batch.

    `peak` holds the largest values of gauges that were read in between, under the same names; where
    it is None the reading after the batch stands for it, which only sees a server still at work.
    """
    gauges = peak if peak is not None else after
    usage = _largest(gauges, _USAGE)
    waiting = _sum(gauges, ("vllm:num_requests_waiting",))
    running = _sum(gauges, ("vllm:num_requests_running",))
    found: list[Advice] = []
    preempted = _grown(before, after, ("vllm:num_preemptions_total", "vllm:num_preemptions"))
    if preempted and (usage is None or usage >= FULL):
        found.append(_preemptions(preempted, usage))
    elif waiting and running and usage is not None and usage < ROOM and waiting > running:
        found.append(_queue(waiting, running, usage))
    hits, queries = _grown(before, after, _HITS), _grown(before, after, _QUERIES)
    if queries and queries >= MANY_QUERIES and hits is not None:
        found.extend(_prefix_cache(hits / queries, queries))
    return tuple(found)


def _preemptions(preempted: float, usage: float | None) -> Advice:
    measured = {"preemptions": preempted}
    if usage is not None:
        measured["kv_cache_usage"] = usage
    return Advice(
        "preemptions",
        f"{preempted:.0f} sequences were thrown out of a full KV cache and computed again. "
        "Lower max_num_seqs (or raise gpu_memory_utilization).",
        measured,
    )


def _queue(waiting: float, running: float, usage: float) -> Advice:
    return Advice(
        "queue_with_room",
        f"{waiting:.0f} requests waited beside {running:.0f} running ones while the KV cache was "
        f"used to {usage:.0%}. Raise max_num_seqs.",
        {"waiting": waiting, "running": running, "kv_cache_usage": usage},
    )


def _prefix_cache(rate: float, queries: float) -> tuple[Advice, ...]:
    if rate >= LOW_HITS:
        return ()
    return (
        Advice(
            "prefix_cache_unused",
            f"The prefix cache answered {rate:.0%} of {queries:.0f} prompt tokens. Put what prompts "
            "share (instructions, examples) at their beginning, and sort rows that share it.",
            {"hit_rate": rate, "queried_tokens": queries},
        ),
    )


def _values(reading: Mapping[str, float], names: tuple[str, ...]) -> list[float]:
    for name in names:
        values = [value for key, value in reading.items() if key.split("{", 1)[0] == name]
        if values:
            return values
    return []


def _sum(reading: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    values = _values(reading, names)
    return sum(values) if values else None


def _largest(reading: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    values = _values(reading, names)
    return max(values) if values else None


def _grown(
    before: Mapping[str, float], after: Mapping[str, float], names: tuple[str, ...]
) -> float | None:
    """How much a counter grew; a counter that went back belongs to a restarted server."""
    last = _sum(after, names)
    if last is None:
        return None
    first = _sum(before, names) or 0.0
    return last - first if last >= first else last
