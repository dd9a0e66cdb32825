"""Only rows without a good answer run again, and what changed says so."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.run import check_inputs
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed, InvalidPrompts
from tests.batch.helpers import ForeignLink, batch_row, read_rows, run, until, write_rows
from tests.fakes.endpoint import ThreadedEndpoint


def spec(folder: Path, rows: list[Any], **more: Any) -> BatchSpec:
    source = write_rows(folder / "in.jsonl", rows)
    return BatchSpec(input_path=str(source), output_path=str(folder / "out.jsonl"), **more)


def asked(server: ThreadedEndpoint) -> set[str]:
    """The prompts since the last call."""
    prompts = {prompt.removeprefix("user: ") for prompt in server.behaviour.prompts}
    server.behaviour.prompts.clear()
    return prompts


def test_a_second_run_asks_nothing(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    rows = [{"prompt": f"p{index}"} for index in range(30)]
    run(spec(tmp_path, rows), link, tmp_path)
    before = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    asked(server)
    result = run(spec(tmp_path, rows), link, tmp_path)
    assert asked(server) == set()
    assert result.manifest.reused == 30
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_changed_prompt_runs_anew_and_says_so(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"p{index}"} for index in range(10)]
    run(spec(tmp_path, rows), link, tmp_path)
    asked(server)
    rows[3] = {"prompt": "new"}
    with caplog.at_level(logging.INFO):
        result = run(spec(tmp_path, rows), link, tmp_path)
    assert asked(server) == {"new"}
    assert result.manifest.changed == 1
    manifest = result.manifest
    assert (manifest.prompt_tokens, manifest.completion_tokens) == (2, 8)
    assert (manifest.total_prompt_tokens, manifest.total_completion_tokens) == (20, 80)
    assert (
        "Resuming: 10 rows, 9 answered before and kept, 1 changed and run again (the input changed), 1 to send"
        in caplog.messages
    )
    assert "new" in str(read_rows(tmp_path / "out.jsonl")[3])


@pytest.mark.parametrize(
    "change", [{"params": {"temperature": 1}}, {"model": "other"}, {"system_prompt": "x"}]
)
def test_changed_parameters_run_everything_anew(
    server: ThreadedEndpoint,
    link: ForeignLink,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
) -> None:
    server.behaviour.models = ("tiny", "other")
    rows = [{"prompt": f"p{index}"} for index in range(10)]
    run(spec(tmp_path, rows), link, tmp_path)
    with caplog.at_level(logging.WARNING):
        result = run(spec(tmp_path, rows, **change), link, tmp_path)
    assert result.manifest.reused == 0
    assert (
        "changed and run again (the model, the template or the parameters changed)" in caplog.text
    )


def test_another_model_under_the_same_name_runs_everything_anew(
    link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"p{index}"} for index in range(5)] + [batch_row("x", "named")]
    link.endpoint = replace(link.endpoint, fingerprint="one")
    run(spec(tmp_path, rows), link, tmp_path)
    assert run(spec(tmp_path, rows), link, tmp_path).manifest.reused == 6
    link.endpoint = replace(link.endpoint, fingerprint="two")
    with pytest.raises(BatchFailed, match="the model, the template or the parameters changed"):
        run(spec(tmp_path, rows, on_changed_input="fail"), link, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert run(spec(tmp_path, rows), link, tmp_path).manifest.reused == 0
    assert (
        "changed and run again (the model, the template or the parameters changed)" in caplog.text
    )


def test_the_output_of_another_input_is_not_overwritten(link: ForeignLink, tmp_path: Path) -> None:
    one, other = (
        BatchSpec(
            input_path=str(write_rows(tmp_path / f"{name}.jsonl", [{"prompt": name}])),
            output_path=str(tmp_path / "out.jsonl"),
        )
        for name in ("one", "other")
    )
    run(one, link, tmp_path, owner="run 1")
    written = (tmp_path / "out.jsonl").read_bytes()
    for output_exists in (True, False):
        with pytest.raises(
            InvalidPrompts, match=r"belongs to another input \(.*one.jsonl of run 1"
        ):
            run(other, link, tmp_path, owner="run 2")
        with pytest.raises(InvalidPrompts, match="belongs to another input"):
            run(other, link, tmp_path)
        if output_exists:
            assert (tmp_path / "out.jsonl").read_bytes() == written
            (tmp_path / "out.jsonl").unlink()
    assert run(one, link, tmp_path, owner="run 1").manifest.reused == 1
    assert run(one, link, tmp_path).manifest.reused == 1
    run(one, link, tmp_path, owner="run 1")
    assert run(other, link, tmp_path, owner="run 1").manifest.reused == 0, "its own to change"


def test_lists_of_two_owners_do_not_share_an_output(link: ForeignLink, tmp_path: Path) -> None:
    one = BatchSpec(prompts=["a"], output_path=str(tmp_path / "out.jsonl"))
    run(one, link, tmp_path, owner="map 0")
    with pytest.raises(InvalidPrompts, match="another list of prompts of map 0"):
        run(one.replace(prompts=["b"]), link, tmp_path, owner="map 1")
    assert run(one, link, tmp_path, owner="map 0").manifest.reused == 1


def test_whose_the_journal_is_is_looked_at_again_under_its_lock(
    link: ForeignLink, tmp_path: Path
) -> None:
    first = spec(tmp_path, [{"prompt": "a"}])
    source = write_rows(tmp_path / "late.jsonl", [{"prompt": "b"}])
    late = first.replace(input_path=str(source))
    checked = check_inputs(late, journal_dir=str(tmp_path / "journal"), owner="late")
    run(first, link, tmp_path, owner="first")
    with pytest.raises(InvalidPrompts, match="belongs to another input"):
        run(late, link, tmp_path, checked=checked)


def test_rows_with_a_custom_id_may_move(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    rows = [batch_row(f"id-{index}", f"p{index}") for index in range(10)]
    run(spec(tmp_path, rows), link, tmp_path)
    asked(server)
    moved = [batch_row("first", "brand new"), *reversed(rows[:8])]
    result = run(spec(tmp_path, moved), link, tmp_path)
    assert asked(server) == {"brand new"}
    assert result.manifest.reused == 8
    ids = [row["custom_id"] for row in read_rows(tmp_path / "out.jsonl")]
    assert ids == [row["custom_id"] for row in moved]


FORMS = ("csv", "parquet", "jsonl", "prompts")


def named(folder: Path, form: str, rows: list[tuple[str, str]]) -> BatchSpec:
    """Rows of columns with a `custom_id` in each form of an input."""
    columns = [{"custom_id": name, "prompt": prompt} for name, prompt in rows]
    output = str(folder / "out.jsonl")
    if form == "prompts":
        return BatchSpec(prompts=columns, output_path=output)
    source = folder / f"in.{form}"
    if form == "jsonl":
        write_rows(source, columns)
    elif form == "csv":
        source.write_text("custom_id,prompt\n" + "".join(f"{n},{p}\n" for n, p in rows))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(columns), source)
    return BatchSpec(input_path=str(source), output_path=output)


def said(folder: Path) -> list[tuple[str, str]]:
    """Name and prompt of every result, as the fake server repeats it."""
    return [
        (row["custom_id"], row["response"]["body"]["choices"][0]["message"]["content"].split()[-1])
        for row in read_rows(folder / "out.jsonl")
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_columns_is_known_by_its_custom_id(
    form: str, server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    rows = [("alice", "x"), ("bob", "y"), ("carol", "z")]
    run(named(tmp_path, form, rows), link, tmp_path)
    asked(server)
    moved = [("new", "n"), *rows[1:], rows[0]]
    assert run(named(tmp_path, form, moved), link, tmp_path).manifest.reused == 3
    assert asked(server) == {"n"}
    assert said(tmp_path) == moved
    swapped = [("new", "n"), ("carol", "y"), ("bob", "z"), ("dave", "x")]
    assert run(named(tmp_path, form, swapped), link, tmp_path).manifest.reused == 1
    assert said(tmp_path) == swapped


def test_a_default_id_that_somebody_takes_is_no_reused_answers(
    link: ForeignLink, tmp_path: Path
) -> None:
    run(spec(tmp_path, [batch_row("own", "a"), {"prompt": "b"}]), link, tmp_path)
    run(spec(tmp_path, [batch_row("row-2", "a"), {"prompt": "b"}]), link, tmp_path)
    assert said(tmp_path) == [("row-2", "a"), ("row-2'", "b")]


def test_changed_input_may_fail(link: ForeignLink, tmp_path: Path) -> None:
    run(spec(tmp_path, [{"prompt": "a"}]), link, tmp_path)
    with pytest.raises(BatchFailed, match="the input changed since an earlier try"):
        run(spec(tmp_path, [{"prompt": "b"}], on_changed_input="fail"), link, tmp_path)
    run(spec(tmp_path, [{"prompt": "a"}], on_changed_input="fail"), link, tmp_path)


def test_error_rows_are_asked_again(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    rows = [{"prompt": f"p{index}"} for index in range(20)] + [{"prompt": "[[once 400]]"}]
    first = run(spec(tmp_path, rows, pack=1), link, tmp_path)
    assert first.manifest.errors == 1
    assert (tmp_path / "out.jsonl.errors.jsonl").exists()
    asked(server)
    second = run(spec(tmp_path, rows, pack=1), link, tmp_path)
    assert asked(server) == {"[[once 400]]"}
    assert second.manifest.outcomes == {"ok": 21}
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists(), "a stale errors file is removed"


def test_equal_prompts_are_different_rows(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    rows = [{"prompt": "same"}] * 10
    run(spec(tmp_path, rows, pack=1), link, tmp_path)
    assert server.behaviour.requests == 10
    assert run(spec(tmp_path, [*rows, {"prompt": "same"}]), link, tmp_path).manifest.reused == 10
    assert server.behaviour.prompts["user: same"] == 11


def resuming(caplog: pytest.LogCaptureFixture) -> str:
    """The one line of the log that says where the batch goes on."""
    (line,) = [text for text in caplog.messages if text.startswith("Resuming: ")]
    caplog.clear()
    return line.removeprefix("Resuming: ")


def test_the_log_says_in_one_line_where_it_goes_on(
    link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rows: list[Any] = [batch_row(f"id-{index}", f"p{index}") for index in range(10)]
    run(spec(tmp_path, rows), link, tmp_path)
    assert "Resuming" not in caplog.text, "nothing was answered before"
    cases = [
        (rows, "10 rows, 10 answered before and kept, 0 changed and run again, 0 to send"),
        (rows[:7], "7 rows, 7 answered before and kept, 0 changed and run again, 0 to send"),
        (
            [batch_row("new", "p"), *rows, b"{broken\n"],
            "12 rows, 10 answered before and kept, 0 changed and run again, 1 that cannot be sent, 1 to send",
        ),
        (
            [batch_row("id-0", "another"), *rows[1:5], batch_row("new-2", "p")],
            "6 rows, 4 answered before and kept, 1 changed and run again (the input changed), 2 to send",
        ),
    ]
    for now, says in cases:
        result = run(spec(tmp_path, now, max_error_rate=1), link, tmp_path)
        assert resuming(caplog) == says
        assert f"{result.manifest.reused} answered before" in says
        assert f"{result.manifest.changed} changed" in says
    assert "no longer asked" not in caplog.text


def test_nothing_is_left_to_send(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A finished batch that is cleared needs no server, and is counted as before."""
    caplog.set_level(logging.INFO)
    rows: list[Any] = [{"prompt": f"p{index}"} for index in range(30)] + [b"{broken\n"]
    first = run(spec(tmp_path, rows), link, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out.jsonl*.jsonl*")}
    assert link.connects == 1
    link.endpoint = replace(link.endpoint, base_url="http://127.0.0.1:9")  # nobody is there
    again = run(spec(tmp_path, rows), link, tmp_path)
    assert link.connects == 1
    assert (again.manifest.rows, again.manifest.outcomes) == (31, first.manifest.outcomes)
    assert again.manifest.reused == 30
    after = {path.name: path.read_bytes() for path in tmp_path.glob("out.jsonl*.jsonl*")}
    assert after == before
    assert "Nothing is left to send" in caplog.text


def test_a_row_that_failed_is_left_to_send(link: ForeignLink, tmp_path: Path) -> None:
    rows = [{"prompt": "[[once 400]]"}, *({"prompt": f"p{index}"} for index in range(20))]
    run(spec(tmp_path, rows, pack=1), link, tmp_path)
    result = run(spec(tmp_path, rows, pack=1), link, tmp_path)
    assert link.connects == 2
    assert result.manifest.outcomes == {"ok": 21}


def test_two_tasks_of_a_run_do_not_share_an_output(link: ForeignLink, tmp_path: Path) -> None:
    """Mapped over models, with one output: refused, whichever was first."""
    rows = [{"prompt": "a"}]
    one, other = (spec(tmp_path, rows, model=model) for model in ("tiny", "other"))
    mine = {"owner": "ask[0]", "run": "run 1"}
    run(one, link, tmp_path, **mine)
    written = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(InvalidPrompts, match=r"also that of ask\[0\] in this run.*map_index"):
        run(other, link, tmp_path, owner="ask[1]", run="run 1")
    assert link.connects == 1, "found before a server is started"
    assert (tmp_path / "out.jsonl").read_bytes() == written
    # The same question by another task, its own retry, and another run are no rivals.
    assert run(one, link, tmp_path, owner="ask[1]", run="run 1").manifest.reused == 1
    run(one.replace(params={"seed": 1}), link, tmp_path, owner="ask[1]", run="run 1")
    run(one, link, tmp_path, owner="ask[0]", run="run 2")


def test_a_task_of_the_same_run_that_still_works_is_a_rival_too(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """Said at once: it does not wait for the lock first."""
    one, other = (spec(tmp_path, [{"prompt": "[[slow 3]]"}], model=m) for m in ("tiny", "other"))
    first = threading.Thread(
        target=run, args=(one, link, tmp_path), kwargs={"owner": "ask[0]", "run": "run 1"}
    )
    first.start()
    try:
        until(lambda: server.behaviour.running == 1)
        began = time.monotonic()
        with pytest.raises(InvalidPrompts, match="also that of"):
            run(other, link, tmp_path, owner="ask[1]", run="run 1")
        assert time.monotonic() - began < 2
    finally:
        first.join()
    assert len(read_rows(tmp_path / "out.jsonl")) == 1


def test_a_server_that_comes_up_otherwise_than_planned(
    link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a start with another option was the remedy: each try plans the one, and gets the other."""

    class Remedied(ForeignLink):
        def planned(self) -> Endpoint:
            return replace(self.endpoint, base_url="", fingerprint="planned")

    other = Remedied(link.endpoint.base_url)
    other.endpoint = replace(link.endpoint, fingerprint="remedied")
    rows = [{"prompt": f"p{index}"} for index in range(5)]
    strict = spec(tmp_path, rows, on_changed_input="fail")
    run(strict, other, tmp_path)
    with caplog.at_level(logging.INFO):
        assert run(strict, other, tmp_path).manifest.reused == 5
    assert "The server is not as planned" in caplog.text
    with pytest.raises(BatchFailed, match="the model, the template or the parameters changed"):
        run(strict.replace(params={"seed": 1}), other, tmp_path)
    assert run(strict, other, tmp_path).manifest.reused == 5


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("rows_then", [0, 20, 60])
def test_an_input_that_changes_while_the_server_starts(
    link: ForeignLink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    rows_then: int,
) -> None:
    """Counted were forty rows. Results that lack some must not pass for whole; the retry takes the input as it is."""
    one = spec(tmp_path, [{"prompt": f"p{index}"} for index in range(40)])
    one = one.replace(output_path=str(tmp_path / f"out.{form}"))
    connect = link.connect

    def change() -> Endpoint:
        write_rows(tmp_path / "in.jsonl", [{"prompt": f"p{index}"} for index in range(rows_then)])
        return connect()

    monkeypatch.setattr(link, "connect", change)
    with pytest.raises(
        BatchFailed, match="the input was changed while the batch ran; every answer"
    ):
        run(one, link, tmp_path)
    assert not (tmp_path / f"out.{form}").exists()
    monkeypatch.undo()
    if rows_then:
        manifest = run(one, link, tmp_path).manifest
        assert (manifest.rows, manifest.ok, manifest.reused) == (rows_then, rows_then, rows_then)
