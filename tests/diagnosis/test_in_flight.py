"""What the engine worked on: numbers of its dump in every form, and never a text or an id."""

from __future__ import annotations

import json

from airflow_provider_vllm.diagnosis.in_flight import MOST, request_in_flight
from airflow_provider_vllm.diagnosis.logs import Record, records
from airflow_provider_vllm.diagnosis.reader import LINE_CHARS

ENGINE = "(EngineCore pid=7) ERROR 11-30 10:00:00 [dump_input.py:79] "
SAMPLING = (
    "SamplingParams(n=1, temperature=1.0, stop=['secret max_tokens=5'], ignore_eos=False, "
    "max_tokens={}, min_tokens=0)"
)
NEW = (
    "NewRequestData(req_id={id},prompt_token_ids_len={prompt},prefill_token_ids_len=None,"
    "mm_features={media},sampling_params={sampling},block_ids=([1, 2],),num_computed_tokens=16,"
    "lora_request={lora},prompt_embeds_shape=None)"
)
CACHED = (
    "CachedRequestData(req_ids=['c-1', 'c-2'],resumed_req_ids=set(),new_token_ids_lens=[],"
    "all_token_ids_lens={},new_block_ids=[None, ([4],)],num_computed_tokens=[100, 2048],"
    "num_output_tokens=[3, 40])"
)
STATS = "Dumping scheduler stats: SchedulerStats(num_running_reqs=4, num_waiting_reqs=7, "


def _read(*lines: str) -> list[Record]:
    return records(list(enumerate(lines, start=1)))


def test_a_dump_of_vllm_0_32() -> None:
    new = [
        NEW.format(id="a-1", prompt=37, media="[]", lora="None", sampling=SAMPLING.format(16)),
        NEW.format(id="a-2", prompt="None", media="[M()]", lora="L()", sampling="None"),
    ]
    dump = (
        f"Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs="
        f"[{', '.join(new)}], scheduled_cached_reqs={CACHED}, num_scheduled_tokens="
        "{a-2: 22, a-1: 37, c-1: 1}, total_num_scheduled_tokens=60)"
    )
    found = request_in_flight(
        _read(
            f"{ENGINE}Dumping input data for V1 LLM engine (v0.32.0) with config: x, ",
            ENGINE + dump,
            f"{ENGINE}{STATS}kv_cache_usage=0.25)",
        )
    )
    assert found == {
        "line": 2,
        "requests": 4,
        "cut": False,
        "new": [
            {
                "prompt_tokens": 37,
                "computed_tokens": 16,
                "scheduled_tokens": 37,
                "max_tokens": 16,
                "media": False,
                "lora": False,
            },
            {
                "prompt_tokens": None,
                "computed_tokens": 16,
                "scheduled_tokens": 22,
                "max_tokens": None,
                "media": True,
                "lora": True,
            },
        ],
        "going_on": [
            {"computed_tokens": 100, "output_tokens": 3, "scheduled_tokens": 1},
            {"computed_tokens": 2048, "output_tokens": 40, "scheduled_tokens": None},
        ],
        "scheduled_tokens": 60,
        "running": 4,
        "waiting": 7,
        "kv_cache_usage": 0.25,
    }
    assert "secret" not in json.dumps(found)
    assert "a-1" not in json.dumps(found)


def test_a_dump_of_vllm_0_8_on_a_line_of_its_own() -> None:
    logger = "ERROR 04-15 17:47:45 [dump_input.py:69] "
    found = request_in_flight(
        _read(
            f"{logger}Dumping scheduler output for model execution:",
            f"{logger}SchedulerOutput(scheduled_new_reqs=[], scheduled_cached_reqs="
            "[CachedRequestData(req_id='r-1', resumed_from_preemption=false, new_token_ids=[1], "
            "new_block_ids=[], num_computed_tokens=511)], num_scheduled_tokens={r-1: 1}, "
            "total_num_scheduled_tokens=1)",
            f"{logger}SchedulerStats(num_running_reqs=1)",
        )
    )
    assert found["requests"] == 1
    assert found["going_on"] == [{"computed_tokens": 511, "scheduled_tokens": 1}]


def test_a_dump_that_was_cut_says_so() -> None:
    many = ", ".join(
        NEW.format(id=f"a-{n}", prompt=9, media="[]", lora="None", sampling="None")
        for n in range(200)
    )
    line = f"{ENGINE}Dumping scheduler output for model execution: SchedulerOutput([{many}"
    found = request_in_flight(_read(line[:LINE_CHARS]))
    assert found["cut"]
    assert len(found["new"]) == min(MOST, found["requests"])


def test_no_dump_has_a_reason() -> None:
    assert "missing" in request_in_flight(_read("(APIServer pid=1) INFO: hello"))
