"""Samples of vLLM's /metrics, with the odd ones among them, and the advice that a batch draws from them."""

from __future__ import annotations

from airflow_provider_vllm import metrics
from airflow_provider_vllm.batch.readings import Readings

METRICS = b"""# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 12.0
vllm:prompt_tokens_total{engine="1",model_name="tiny"} 1e+02
vllm:generation_tokens_total{engine="0",model_name="a}b {c"} 3.0
vllm:gpu_cache_usage_perc NaN
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 7.0
python_gc_objects_collected_total{generation="0"} 9.0
"""


def test_samples_keep_their_labels_and_totals_add_them_up() -> None:
    samples = metrics.read(METRICS)
    assert len(samples) == 4
    assert metrics.total(samples, "prompt_tokens") == 112.0
    assert metrics.total(samples, "generation_tokens") == 3.0
    assert metrics.total(samples, "gpu_cache_usage_perc") is None
    assert metrics.moved(samples) == 115.0


def test_what_is_no_vllm_has_no_samples() -> None:
    for text in (b"", b"<html>vllm:x 1</html>", b"process_cpu_seconds_total 5\n"):
        assert metrics.read(text) == {}
        assert metrics.moved(metrics.read(text)) is None


def look(preemptions: int, usage: float) -> dict[str, float]:
    return {
        'vllm:num_preemptions_total{engine="0"}': preemptions,
        'vllm:kv_cache_usage_perc{engine="0"}': usage,
    }


def test_preemptions_with_a_full_cache_are_advised_on() -> None:
    readings = Readings()
    for samples in (look(2, 0.1), {}, look(2, 0.99), look(9, 0.2)):
        readings.add(samples)
    (advice,) = readings.advice()
    assert advice.id == "preemptions"
    assert advice.measured == {"preemptions": 7.0, "kv_cache_usage": 0.99}
    assert "max_num_seqs" in advice.text


def test_a_server_at_ease_gets_no_advice() -> None:
    readings = Readings()
    assert readings.advice() == ()
    readings.add(look(2, 0.1))
    readings.add(look(2, 0.5))
    assert readings.advice() == ()
