"""Every endpoint on real vLLM: what each is asked and answers, packed and not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import batch_row, run
from tests.batch.test_real_vllm import RealLink

pytestmark = [pytest.mark.vllm, pytest.mark.full]
DIGIT = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["digit"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "a"}]
Start = Callable[..., RealLink]


@pytest.fixture
def start(vllm_python: Path, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    links = []

    def start(*flags: str) -> RealLink:
        links.append(RealLink(vllm_python, tiny_model, tmp_path / "vllm.log", *flags))
        return links[-1]

    yield start
    for link in links:
        link.end()


def ask(link: RealLink, folder: Path, prompts: list[Any], endpoint: str, **more: Any) -> list[Any]:
    """The answers, none of which failed."""
    spec = BatchSpec(prompts=prompts, endpoint=endpoint, **more)
    result = run(spec, link, folder / f"{len(list(folder.iterdir()))}")
    assert result.errors == []
    assert result.answers is not None
    return result.answers


def test_generation(start: Start, tmp_path: Path) -> None:
    link = start()
    for pack in (1, 4):
        for endpoint, limit in (("chat", "max_tokens"), ("completions", "max_tokens")):
            found = ask(link, tmp_path, ["a", "b", "c", "d"], endpoint, pack=pack,
                        output_schema=DIGIT, params={limit: 64})  # fmt: skip
            assert all(0 <= json.loads(text)["digit"] <= 9 for text in found)
    found = ask(link, tmp_path, ["a", MESSAGES], "responses", output_schema=DIGIT,
                params={"max_output_tokens": 64}, system_prompt="Be short.")  # fmt: skip
    assert all(0 <= json.loads(text)["digit"] <= 9 for text in found)
    texts = {"params": {"temperature": "0.5", "max_tokens": "3"}}  # numbers as text
    mixed = [{"prompt": "a", **texts}, batch_row("x", "b", url="/v1/completions", model="m")]
    assert all(isinstance(text, str) for text in ask(link, tmp_path, mixed, "chat"))


def test_embedding(start: Start, tmp_path: Path) -> None:
    link = start("--runner", "pooling", "--convert", "embed")
    alone, packed = (
        ask(link, tmp_path, ["a", "b", "c", "d"], "embeddings", pack=pack) for pack in (1, 4)
    )
    assert [len(vector) for vector in alone] == [len(vector) for vector in packed]
    for one, other in zip(alone, packed, strict=True):
        assert one == pytest.approx(other, abs=0.02)
    (several,) = ask(link, tmp_path, [{"input": ["a", "b"]}], "embeddings")
    assert len(several) == 2
    for endpoint in ("embeddings", "pooling"):
        (vector,) = ask(link, tmp_path, [MESSAGES], endpoint)
        assert all(isinstance(number, float) for number in vector)
    pairs = [{"text_1": "a", "text_2": "b"}, {"queries": "a", "documents": ["b", "c"]}]
    one, two = ask(link, tmp_path, pairs, "score")
    assert isinstance(one, float)
    assert len(two) == 2
    (ranked,) = ask(link, tmp_path, [{"query": "a", "documents": ["b", "c"]}], "rerank")
    assert sorted(each["index"] for each in ranked) == [0, 1]


def test_classification(start: Start, tmp_path: Path) -> None:
    link = start("--runner", "pooling", "--convert", "classify")
    found = ask(link, tmp_path, ["a", {"input": ["a", "b"]}], "classify")
    assert found[0].startswith("LABEL_")
    assert len(found[1]) == 2
