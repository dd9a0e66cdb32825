"""The kill matrix: whatever dies, no row is lost or doubled, and the results are those of a quiet run.

The default run has a few cells of each kind, `full` the whole matrix.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.run import BatchResult
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed
from tests.batch.helpers import (
    ForeignLink,
    OwnLink,
    batch_row,
    read_rows,
    run,
    start_child,
    until,
    write_rows,
)
from tests.batch.matrix import (
    ROWS,
    arguments,
    check,
    finish,
    ids,
    journalled,
    killed_at,
    spec_of,
)
from tests.fakes.endpoint import ThreadedEndpoint

# The task.


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 10))]
)
def test_sigkill_of_the_task_at_random_moments(
    server: ThreadedEndpoint, tmp_path: Path, quiet: dict[str, bytes], seed: int
) -> None:
    server.behaviour.latency = 0.01
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(20, ROWS - 60), 3))
    for moment in moments:
        process = start_child(tmp_path / "journal", server.base_url, arguments(tmp_path))
        with killed_at(process):
            until(lambda moment=moment: server.behaviour.prompts.total() >= moment)  # type: ignore[misc]
        assert finish(process)[0] == -signal.SIGKILL
        assert not (tmp_path / "out.jsonl").exists()
    status, out, err = finish(
        start_child(tmp_path / "journal", server.base_url, arguments(tmp_path))
    )
    assert status == 0, err
    check(tmp_path, quiet)
    # Not one answered row was asked again: only what was in flight at a kill, at most 16 rows each time.
    asked = server.behaviour.prompts.total()
    assert asked <= ROWS - 1 + 3 * 17
    assert json.loads(out)["reused"] >= moments[-1] - 3 * 17


def test_a_signal_handler_that_raises_unwinds_at_once(
    server: ThreadedEndpoint, tmp_path: Path, quiet: dict[str, bytes]
) -> None:
    server.behaviour.latency = 0.01
    process = start_child(tmp_path / "journal", server.base_url, arguments(tmp_path))
    with killed_at(process, signal.SIGUSR1):
        until(lambda: server.behaviour.prompts.total() >= 200)
    assert finish(process)[0] == 4
    journal = Journal(tmp_path / "journal")
    journal.open()
    answered = len(journal.earlier().answers)
    journal.close()
    assert answered >= 200 - 16 - 1
    run(spec_of(tmp_path), ForeignLink(server.base_url), tmp_path)
    check(tmp_path, quiet)


def test_it_unwinds_at_once_in_the_middle_of_a_probe(
    server: ThreadedEndpoint, tmp_path: Path
) -> None:
    server.behaviour.frozen = True
    given = arguments(tmp_path, stall_timeout=0.2, probe_timeout=60, request_timeout=60)
    process = start_child(tmp_path / "journal", server.base_url, given)
    until(lambda: server.behaviour.requests == 16 + 1)  # what is in flight, and the probe
    began = time.monotonic()
    with killed_at(process, signal.SIGUSR1):
        pass
    assert finish(process)[0] == 4
    assert time.monotonic() - began < 3


def test_the_retry_on_another_hosts_directory(
    server: ThreadedEndpoint, tmp_path: Path, quiet: dict[str, bytes]
) -> None:
    """Nothing of the journal is there: everything runs again, with the same result."""
    server.behaviour.latency = 0.01
    process = start_child(tmp_path / "journal", server.base_url, arguments(tmp_path))
    with killed_at(process):
        until(lambda: server.behaviour.prompts.total() >= 200)
    finish(process)
    run(spec_of(tmp_path), ForeignLink(server.base_url), tmp_path / "elsewhere")
    check(tmp_path, quiet)


def test_a_copied_journal_is_enough(
    server: ThreadedEndpoint, tmp_path: Path, quiet: dict[str, bytes]
) -> None:
    import shutil

    server.behaviour.latency = 0.01
    process = start_child(tmp_path / "journal", server.base_url, arguments(tmp_path))
    with killed_at(process):
        until(lambda: server.behaviour.prompts.total() >= 200)
    finish(process)
    shutil.copytree(tmp_path / "journal", tmp_path / "other" / "journal")
    result = run(spec_of(tmp_path), ForeignLink(server.base_url), tmp_path / "other")
    assert result.manifest.reused >= 200 - 17
    check(tmp_path, quiet)


# The server.


@pytest.mark.parametrize(
    "pack", [1, pytest.param(4, marks=pytest.mark.full)], ids=["alone", "packed"]
)
def test_sigkill_of_the_server(tmp_path: Path, quiet: dict[str, bytes], pack: int) -> None:
    link = OwnLink(latency=0.02)
    first = link.process

    def kill() -> None:
        until(lambda: journalled(tmp_path) >= 100)
        first.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        result = run(spec_of(tmp_path, pack=pack), link, tmp_path)
    finally:
        killer.join()
        link.kill()
    assert result.manifest.server_losses == len(link.losses) == 1
    if pack == 1:
        check(tmp_path, quiet)
    else:
        assert [row["custom_id"] for row in read_rows(tmp_path / "out.jsonl")] == ids(quiet)


def test_an_engine_that_dies_behind_a_living_api_server(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, quiet: dict[str, bytes]
) -> None:
    """Requests get 500 and /health 503, as vLLM does, until somebody starts it again."""
    server.behaviour.latency = 0.01

    def come_back() -> None:
        server.behaviour.health, server.behaviour.status = 200, None

    def die() -> None:
        until(lambda: server.behaviour.prompts.total() >= 150)
        server.behaviour.health, server.behaviour.status = 503, 500

    link.on_recover = come_back
    killer = threading.Thread(target=die)
    killer.start()
    run(spec_of(tmp_path), link, tmp_path)
    killer.join()
    assert len(link.losses) == 1
    check(tmp_path, quiet)


def test_a_server_that_never_comes_back(
    link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = OwnLink(restarts=0, latency=0.02)
    process = lost.process

    def kill() -> None:
        until(lambda: journalled(tmp_path) >= 50)
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(BatchFailed, match=r"did not come back.*answers are kept") as caught:
        run(spec_of(tmp_path), lost, tmp_path)
    killer.join()
    manifest = caught.value.manifest
    assert manifest is not None
    assert manifest["ok"] >= 40
    (summary,) = [line for line in caplog.messages if line.startswith("Failed: ")]
    assert f"{manifest['ok']} ok" in summary
    result = run(spec_of(tmp_path), link, tmp_path)
    assert result.manifest.reused == manifest["ok"]


@pytest.mark.parametrize("pack", [1, 8])
def test_a_row_that_kills_the_server(tmp_path: Path, pack: int) -> None:
    """It stands alone in the end, and everything else is answered."""
    link = OwnLink(latency=0.02)
    made = [batch_row(f"id-{index}", f"prompt {index}") for index in range(80)]
    made[40] = batch_row("killer", "[[die]]")
    source = write_rows(tmp_path / "in.jsonl", made)
    spec = BatchSpec(
        input_path=str(source),
        output_path=str(tmp_path / "out.jsonl"),
        concurrency=8,
        pack=pack,
    )
    try:
        result = run(spec, link, tmp_path)
    finally:
        link.kill()
    assert result.manifest.outcomes == {"ok": 79, "suspect": 1}
    (error,) = read_rows(tmp_path / "out.jsonl.errors.jsonl")
    assert error["custom_id"] == "killer"
    assert error["error"]["code"] == "suspect"
    assert "at last alone" in error["error"]["message"]
    # Two losses with others in flight, the third with the suspect alone.
    assert result.manifest.server_losses == 3


def with_killers(folder: Path, *killers: int) -> BatchSpec:
    """80 rows, eight in flight; those of `killers` take the server down as soon as they come."""
    made = [batch_row(f"id-{index}", f"prompt {index}") for index in range(80)]
    for index in killers:
        made[index] = batch_row(f"killer-{index}", f"[[die]] {index}")
    source = write_rows(folder / "in.jsonl", made)
    return BatchSpec(
        input_path=str(source), output_path=str(folder / "out.jsonl"), concurrency=8, pack=1
    )


def suspects(folder: Path) -> dict[str, str]:
    """What the errors file says of each suspect."""
    rows = read_rows(folder / "out.jsonl.errors.jsonl")
    assert {row["error"]["code"] for row in rows} == {"suspect"}
    return {row["custom_id"]: row["error"]["message"] for row in rows}


def test_deadly_rows_of_one_moment_cost_one_try(tmp_path: Path) -> None:
    """A death that a row is to blame for does not use up the restarts, as long as others are answered in between."""
    spec = with_killers(tmp_path, 0, 2, 4, 6)
    link = OwnLink(latency=0.02)
    try:
        first = run(spec, link, tmp_path)
        assert first.manifest.outcomes == {"ok": 76, "suspect": 4}
        assert (first.manifest.server_losses, first.manifest.server_restarts) == (6, 6)
        second = run(spec, link, tmp_path)
    finally:
        link.kill()
    # The next try asks one of them again, and then believes it of the others.
    assert second.manifest.outcomes == {"ok": 76, "suspect": 4}
    assert (second.manifest.server_losses, second.manifest.server_restarts) == (1, 0)
    said = suspects(tmp_path)
    assert "in an earlier try and now again" in said["killer-0"]
    assert all("killer-0, of the same kind" in said[f"killer-{index}"] for index in (2, 4, 6))


def test_deadly_rows_in_a_row_count_against_the_server(tmp_path: Path) -> None:
    """Nothing is answered between them, so it may be the server; the next try gets further."""
    spec = with_killers(tmp_path, 0, 1, 2)
    assert one_try(spec, tmp_path) is None
    second = one_try(spec, tmp_path)
    assert second is not None
    assert second.manifest.outcomes == {"ok": 77, "suspect": 3}
    assert set(suspects(tmp_path)) == {"killer-0", "killer-1", "killer-2"}


def test_a_deadly_row_is_asked_again_by_the_next_try(link: ForeignLink, tmp_path: Path) -> None:
    """Somebody may have mended what it met: this server stands it."""
    spec = with_killers(tmp_path, 5)
    first = one_try(spec, tmp_path)
    assert first is not None and first.manifest.outcomes == {"ok": 79, "suspect": 1}
    second = run(spec, link, tmp_path)
    assert second.manifest.outcomes == {"ok": 80}
    assert second.manifest.reused == 79
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


def one_try(spec: BatchSpec, folder: Path) -> BatchResult | None:
    """None where two restarts were not enough."""
    link = OwnLink(restarts=2, latency=0.02)
    try:
        return run(spec, link, folder)
    except BatchFailed:
        return None
    finally:
        link.kill()


def test_deadly_rows_are_remembered_by_the_next_try(tmp_path: Path) -> None:
    """Two of them use up the restarts of one try; the next one runs them alone from the start."""
    made = [batch_row(f"id-{index}", f"prompt {index}") for index in range(80)]
    made[20] = batch_row("killer-1", "[[die]] 1")
    made[60] = batch_row("killer-2", "[[die]] 2")
    source = write_rows(tmp_path / "in.jsonl", made)
    spec = BatchSpec(
        input_path=str(source), output_path=str(tmp_path / "out.jsonl"), concurrency=4, pack=1
    )
    tries = [one_try(spec, tmp_path)]
    assert tries[0] is None, "one try had restarts enough: the test shows nothing"
    while tries[-1] is None and len(tries) < 3:  # Airflow's first try and two retries
        tries.append(one_try(spec, tmp_path))
    result = tries[-1]
    assert result is not None, "the same rows fail every try"
    assert result.manifest.outcomes == {"ok": 78, "suspect": 2}
    assert [row["custom_id"] for row in read_rows(tmp_path / "out.jsonl.errors.jsonl")] == [
        "killer-1",
        "killer-2",
    ]
