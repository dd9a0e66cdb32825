"""A batch that its rows doom is refused before any server is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch import unsendable
from airflow_provider_vllm.batch.check import check_inputs
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed
from tests.batch.helpers import ForeignLink, batch_row, run, write_rows
from tests.fakes.endpoint import ThreadedEndpoint

GOOD, BAD = {"prompt": "a"}, {"prompt": 1}


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., BatchSpec]:
    """Of rows in a file."""

    def make(rows: list[Any], **more: Any) -> BatchSpec:
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return BatchSpec(input_path=str(source), output_path=str(tmp_path / "out.jsonl"), **more)

    return make


def test_no_server_is_asked_and_every_bad_row_is_named(
    spec: Callable[..., BatchSpec],
    link: ForeignLink,
    server: ThreadedEndpoint,
    tmp_path: Path,
) -> None:
    with pytest.raises(BatchFailed) as caught:
        run(spec([GOOD, BAD, GOOD, BAD]), link, tmp_path)
    text = str(caught.value)
    assert "2 of 4 rows failed, more than max_error_rate=0.1 allows" in text
    assert "no server was asked" in text
    assert "in.jsonl, line 2: prompt is a number, not text or a list" in text
    assert link.connects == server.behaviour.requests == 0
    errors = tmp_path / "out.jsonl.errors.jsonl"
    assert f"all errors: {errors}" in text
    found = [json.loads(line) for line in errors.read_text().splitlines()]
    assert [each["custom_id"] for each in found] == ["row-2", "row-4"]
    assert [each["error"]["line"] for each in found] == [2, 4]


def test_what_good_answers_can_still_mend_is_sent(
    spec: Callable[..., BatchSpec], link: ForeignLink, tmp_path: Path
) -> None:
    result = run(spec([BAD, *[GOOD] * 9]), link, tmp_path)
    assert result.manifest.outcomes == {"invalid_input": 1, "ok": 9}


def test_max_errors_is_judged(
    spec: Callable[..., BatchSpec], link: ForeignLink, tmp_path: Path
) -> None:
    with pytest.raises(BatchFailed, match="max_errors=1: they cannot be sent"):
        run(spec([BAD, BAD, *[GOOD] * 98], max_errors=1), link, tmp_path)
    assert link.connects == 0


def test_a_list_of_prompts_has_no_errors_file(link: ForeignLink, tmp_path: Path) -> None:
    with pytest.raises(BatchFailed, match="prompts, row 1: prompt is empty") as caught:
        run(BatchSpec(prompts=["", "a"]), link, tmp_path)
    assert "all errors" not in str(caught.value)
    (error,) = caught.value.errors or [{}]
    assert (error["row"], error["custom_id"], error["code"]) == (0, "row-1", "invalid_prompt")
    assert link.connects == 0


def test_answers_of_an_earlier_try_are_kept(
    spec: Callable[..., BatchSpec], link: ForeignLink, tmp_path: Path
) -> None:
    run(spec([GOOD, GOOD]), link, tmp_path)
    with pytest.raises(BatchFailed, match="no server was asked"):
        run(spec([GOOD, BAD, {"prompt": "b"}]), link, tmp_path)
    assert link.connects == 1
    result = run(spec([GOOD, {"prompt": "b"}]), link, tmp_path)
    assert (result.manifest.reused, result.manifest.outcomes) == (1, {"ok": 2})


@pytest.mark.parametrize(
    ("bad", "read", "judged"),
    [
        # Good ones come first: the rest is left to the sending.
        pytest.param(slice(30, 100), 10, False, id="good first"),
        # Too many are bad: read on until it is certain, which it never is of fewer than 50.
        pytest.param(slice(0, 100), 50, True, id="all bad"),
        pytest.param(slice(0, 8), 80, False, id="bad first, but not too many"),
    ],
)
def test_a_long_input_is_read_on_only_while_too_many_are_bad(
    spec: Callable[..., BatchSpec],
    monkeypatch: pytest.MonkeyPatch,
    bad: slice,
    read: int,
    judged: bool,
) -> None:
    monkeypatch.setattr(unsendable, "LOOK", 10)
    rows: list[Any] = [GOOD] * 100
    rows[bad] = [BAD] * len(rows[bad])
    batch = spec(rows)
    found = unsendable.look(batch, check_inputs(batch), "tiny", 100)
    assert found.read == read
    assert (found.reason is not None) is judged


@pytest.mark.parametrize(("model", "told"), [("gpt-4o-mini", True), ("loud", False), (None, False)])
def test_a_model_that_the_server_will_not_have_is_told_of_before_it_is_loaded(
    link: ForeignLink,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model: str | None,
    told: bool,
) -> None:
    """A batch file for another server names its model in every row."""
    named = {} if model is None else {"model": model}
    rows = [batch_row("a", "x", **named), batch_row("b", "y", **named)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    link.endpoint = replace(link.endpoint, names=("tiny", "loud"))
    batch = BatchSpec(
        input_path=str(source), output_path=str(tmp_path / "out.jsonl"), max_error_rate=1
    )
    run(batch, link, tmp_path)
    warnings = [text for text in caplog.messages if "the server will have loud, tiny" in text]
    assert bool(warnings) is told
    assert all(text.startswith(f"a ({source}, line 1) asks for the model") for text in warnings)
