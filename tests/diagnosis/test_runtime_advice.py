"""Advice from two readings of /metrics."""

from __future__ import annotations

import pytest

from airflow_provider_vllm.diagnosis.runtime_advice import advise

USAGE = 'vllm:kv_cache_usage_perc{engine="0"}'
PREEMPTIONS = 'vllm:num_preemptions_total{engine="0"}'
WAITING = 'vllm:num_requests_waiting{engine="0"}'
RUNNING = 'vllm:num_requests_running{engine="0"}'
HITS = 'vllm:prefix_cache_hits_total{engine="0"}'
QUERIES = 'vllm:prefix_cache_queries_total{engine="0"}'


@pytest.mark.parametrize(
    ("before", "after", "peak", "ids"),
    [
        ({PREEMPTIONS: 5}, {PREEMPTIONS: 25, USAGE: 0.99}, None, ["preemptions"]),
        ({PREEMPTIONS: 5}, {PREEMPTIONS: 25, USAGE: 0.0}, {USAGE: 0.99}, ["preemptions"]),
        ({PREEMPTIONS: 5}, {PREEMPTIONS: 5, USAGE: 0.99}, None, []),
        ({PREEMPTIONS: 50}, {PREEMPTIONS: 3, USAGE: 0.99}, None, ["preemptions"]),
        ({}, {WAITING: 90, RUNNING: 30, USAGE: 0.2}, None, ["queue_with_room"]),
        ({}, {WAITING: 9, RUNNING: 30, USAGE: 0.2}, None, []),
        ({}, {WAITING: 90, RUNNING: 30, USAGE: 0.9}, None, []),
        ({HITS: 0, QUERIES: 0}, {HITS: 100, QUERIES: 50_000}, None, ["prefix_cache_unused"]),
        ({HITS: 0, QUERIES: 0}, {HITS: 9_000, QUERIES: 50_000}, None, []),
        ({HITS: 0, QUERIES: 0}, {HITS: 0, QUERIES: 500}, None, []),
        ({}, {}, None, []),
    ],
)
def test_advice(
    before: dict[str, float],
    after: dict[str, float],
    peak: dict[str, float] | None,
    ids: list[str],
) -> None:
    assert [advice.id for advice in advise(before, after, peak=peak)] == ids


def test_engines_are_added_up_and_the_fullest_cache_counts() -> None:
    after = {
        'vllm:num_preemptions_total{engine="0"}': 3.0,
        'vllm:num_preemptions_total{engine="1"}': 4.0,
        'vllm:kv_cache_usage_perc{engine="0"}': 0.4,
        'vllm:kv_cache_usage_perc{engine="1"}': 0.95,
    }
    (advice,) = advise({}, after)
    assert advice.measured == {"preemptions": 7.0, "kv_cache_usage": 0.95}
    assert "max_num_seqs" in advice.text
    assert advice.to_json()["id"] == "preemptions"
