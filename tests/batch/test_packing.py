"""Several rows to a request: same results, order, counts and resume as one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import CHAT, ForeignLink, batch_row, run
from tests.fakes.endpoint import ThreadedEndpoint

ENDPOINTS = ["chat", "completions", "embeddings"]


def both(
    link: ForeignLink, tmp_path: Path, prompts: list[Any], **more: Any
) -> tuple[list[Any], list[Any]]:
    """Answers without and with packs, after checking that the counts agree."""
    alone = run(BatchSpec(prompts=prompts, pack=1, **more), link, tmp_path / "alone")
    packed = run(BatchSpec(prompts=prompts, pack=8, **more), link, tmp_path / "packed")
    assert alone.manifest.outcomes == packed.manifest.outcomes
    assert alone.manifest.prompt_tokens == packed.manifest.prompt_tokens
    assert alone.manifest.completion_tokens == packed.manifest.completion_tokens
    assert alone.answers is not None
    assert packed.answers is not None
    return alone.answers, packed.answers


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_same_answers(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, endpoint: str
) -> None:
    prompts = [f"p{index}" for index in range(50)]
    alone, packed = both(link, tmp_path, prompts, endpoint=endpoint)
    assert alone == packed
    assert server.behaviour.largest_pack == 8
    assert server.behaviour.requests <= 50 + 10


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("bad", ["[[status 400]]", "[[status 500]]", "[[garbage]]", "[[once 503]]"])
def test_one_bad_row_harms_no_other(
    link: ForeignLink, tmp_path: Path, endpoint: str, bad: str
) -> None:
    prompts = [f"p{index}" for index in range(20)]
    prompts[11] = bad
    alone, packed = both(
        link, tmp_path, prompts, endpoint=endpoint, max_retries=1, request_timeout=5
    )
    assert alone == packed


def test_only_equal_parameters_travel_together(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    rows = [batch_row(f"id-{i}", f"p{i}", temperature=0.1 * (i // 5)) for i in range(20)]
    result = run(BatchSpec(prompts=rows, pack=8), link, tmp_path)
    assert result.manifest.outcomes == {"ok": 20}
    assert server.behaviour.largest_pack == 5
    for body in server.behaviour.bodies:
        contents = [messages[0]["content"] for messages in body["messages"]]
        assert {int(text[1:]) // 5 for text in contents} == {round(body["temperature"] * 10)}


@pytest.mark.parametrize(
    "own", [{"n": 2}, {"tools": []}, {"ignore_eos": True}, {"stream_options": {}}], ids=str
)
def test_what_the_pack_endpoint_does_not_know_travels_alone(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, own: dict[str, Any]
) -> None:
    rows = [batch_row(f"id-{i}", f"p{i}", **own) for i in range(6)]
    run(BatchSpec(prompts=rows, pack=8), link, tmp_path)
    assert server.behaviour.requests == 6
    assert all(body["messages"][0]["role"] == "user" for body in server.behaviour.bodies)


@pytest.mark.parametrize("vllm", [True, False])
def test_a_server_without_the_endpoint(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, vllm: bool
) -> None:
    server.behaviour.chat_batch, server.behaviour.vllm = False, vllm
    prompts = [f"p{index}" for index in range(100)]
    result = run(BatchSpec(prompts=prompts, pack=8, concurrency=16), link, tmp_path)
    assert result.manifest.outcomes == {"ok": 100}
    assert result.manifest.pack == 1
    assert server.behaviour.requests <= 100 + 4


def test_a_packed_answer_is_resumed_alone_and_the_other_way_round(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    prompts = [f"p{index}" for index in range(20)]
    run(BatchSpec(prompts=prompts[:10], pack=4), link, tmp_path)
    result = run(BatchSpec(prompts=prompts, pack=1), link, tmp_path)
    assert result.manifest.reused == 10
    again = run(BatchSpec(prompts=[*prompts, "new"], pack=4), link, tmp_path)
    assert again.manifest.reused == 20


def test_packs_carry_the_schema(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    schema = {"type": "object", "required": ["a"]}
    prompts = ['[[say {"a": 1}]]', '[[say {"b": 1}]]'] * 4
    spec = BatchSpec(prompts=prompts, pack=8, output_schema=schema, max_error_rate=1)
    result = run(spec, link, tmp_path)
    assert result.manifest.outcomes == {"invalid_output": 4, "ok": 4}
    assert server.behaviour.bodies[0]["response_format"]["json_schema"]["schema"] == schema
    assert CHAT  # the single endpoint was not needed
    assert server.behaviour.requests == 1


def test_an_unknown_model_does_not_turn_packs_off(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    rows = [batch_row(f"id-{i}", f"p{i}") for i in range(60)]
    rows[:8] = [batch_row(f"id-{i}", f"p{i}", model="nobody") for i in range(8)]
    spec = BatchSpec(prompts=rows, pack=8, concurrency=8, max_error_rate=1)
    result = run(spec, link, tmp_path)
    assert result.manifest.outcomes == {"ok": 52, "rejected": 8}
    assert result.manifest.pack == 8
    assert server.behaviour.largest_pack == 8


@pytest.mark.parametrize(
    ("params", "endpoint", "packed"),
    [
        ({"max_tokens": 8}, "chat", True),
        ({"max_completion_tokens": 8}, "chat", True),
        ({"max_tokens": 800}, "chat", False),
        ({}, "chat", False),
        ({}, "embeddings", True),
    ],
)
def test_short_rows_are_packed_from_the_start(
    server: ThreadedEndpoint,
    link: ForeignLink,
    tmp_path: Path,
    params: dict[str, Any],
    endpoint: str,
    packed: bool,
) -> None:
    spec = BatchSpec(prompts=["a", "b", "c"], params=params, endpoint=endpoint)
    run(spec, link, tmp_path)
    assert server.behaviour.requests == (1 if packed else 3)
