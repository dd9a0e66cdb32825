"""Fields that a server would ignore without a word are named in the log, once."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.api import CHAT, COMPLETIONS, NAMES, RESPONSES
from airflow_provider_vllm.batch.parameters import (
    KNOWN,
    MOST_SETS,
    Spelling,
    check_names,
    nearest,
)
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidInput
from tests.batch.helpers import LOG, ForeignLink, batch_row, run

# Prints the fields of vLLM's request classes by our names of the endpoints.
FIELDS = """
import json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.classify import protocol as classify
from vllm.entrypoints.pooling.embed import protocol as embed
from vllm.entrypoints.pooling.pooling import protocol as pooling
from vllm.entrypoints.pooling.scoring import protocol as scoring
classes = {
    "chat": [ChatCompletionRequest], "completions": [CompletionRequest], "responses": [ResponsesRequest],
    "embeddings": [embed.EmbeddingCompletionRequest, embed.EmbeddingChatRequest],
    "classify": [classify.ClassificationCompletionRequest, classify.ClassificationChatRequest],
    "pooling": [pooling.PoolingCompletionRequest, pooling.PoolingChatRequest, pooling.IOProcessorRequest],
    "score": [scoring.ScoreTextRequest, scoring.ScoreDataRequest, scoring.ScoreQueriesDocumentsRequest],
    "rerank": [scoring.RerankRequest],
}
print(json.dumps({name: [f for c in group for f in c.model_fields] for name, group in classes.items()}))
"""


@pytest.mark.parametrize(
    ("url", "name", "meant"),
    [
        (CHAT, "temprature", "temperature"),
        (CHAT, "max_token", "max_tokens"),
        (CHAT, "top_pp", "top_p"),
        (CHAT, "topK", "top_k"),
        (CHAT, "maxTokens", "max_tokens"),
        (CHAT, "frequencey_penalty", "frequency_penalty"),
        (COMPLETIONS, "max_new_tokens", "max_tokens"),
        (COMPLETIONS, "guided_json", "structured_outputs"),
        (COMPLETIONS, "max_completion_tokens", "max_tokens"),
        (RESPONSES, "max_tokens", "max_output_tokens"),
        (CHAT, "num_beams", None),
        (CHAT, "x", None),
    ],
)
def test_what_was_meant(url: str, name: str, meant: str | None) -> None:
    assert name not in KNOWN[url]
    assert nearest(url, name) == meant


def words(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(each.levelname, each.getMessage()) for each in caplog.records]
    return [(level, text) for level, text in found if "field" in text]


def test_once_in_a_batch(
    link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        *[{"prompt": "a", "params": {"temprature": 1}}] * 5,
        batch_row("b", "b", top_pp=1, my_own=2),
        *[batch_row(f"c{index}", "c", my_own=index) for index in range(5)],
        batch_row("d", "d", url=COMPLETIONS, extra_body={"top_k": 1}),
    ]
    caplog.set_level(logging.INFO, LOG.name)
    spec = BatchSpec(prompts=rows, params={"max_token": 3})
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 12}
    said = words(caplog)
    assert [level for level, _ in said] == ["WARNING", "WARNING", "WARNING", "INFO", "WARNING"]
    for (_, text), names in zip(
        said,
        [("Row 1,", "max_token'", "max_tokens"), ("Row 1,", "temprature", "temperature"),
         ("Row 6,", "top_pp", "top_p"), ("Row 6,", "my_own", "ignores"), ("Row 12,", "extra_body", "beside it")],
        strict=True,
    ):  # fmt: skip
        assert all(name in text for name in names), text


def test_right_names_say_nothing(
    link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    rows = [{"prompt": "a", "temprature": 5, "params": {"top_k": 3, "stop": ["x"], "n": 1}}]
    run(BatchSpec(prompts=rows, params={"max_tokens": 3}), link, tmp_path)
    assert words(caplog) == []


def test_fields_with_random_names_take_no_memory() -> None:
    spelling = Spelling(LOG)
    for index in range(MOST_SETS + 500):
        spelling.look(CHAT, {f"field-{index}": 1}, index)
    assert len(spelling._seen) == MOST_SETS


@pytest.mark.vllm
def test_the_names_are_those_of_vllm(vllm_python: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    done = subprocess.run(
        [vllm_python, "-c", FIELDS], env=kept, capture_output=True, text=True, check=True
    )
    theirs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert theirs.keys() == NAMES.keys()
    for name, fields in theirs.items():
        assert set(fields) - KNOWN[NAMES[name]] == set(), name


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": "hot"},
        {"temperature": -3},
        {"temperature": True},
        {"top_p": 7},
        {"max_tokens": "many"},
        {"max_tokens": [8]},
        {"n": 0},
        {"presence_penalty": 3},
    ],
)
def test_a_value_that_every_row_would_be_refused_for(params: dict[str, Any]) -> None:
    (name,) = params
    with pytest.raises(InvalidInput, match=f"{name} is .* for every row; use a number from"):
        BatchSpec(prompts=["a"], params=params)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "top_p": 1.0, "max_tokens": 8, "n": 2, "top_k": -1},
        {"temperature": "0.5", "max_tokens": "8"},  # as a template renders them
        {"temperature": None},
    ],
)
def test_values_that_may_stand(params: dict[str, Any]) -> None:
    assert BatchSpec(prompts=["a"], params=params).params == params


def test_names_that_may_stand() -> None:
    check_names(
        CHAT, ["temperature", "top_k", "vllm_xargs", "something_else_entirely", "guided_json"]
    )
    with pytest.raises(
        InvalidInput, match=r"no parameter 'temprature'.*did you mean 'temperature'"
    ):
        check_names(CHAT, ["temprature"])
