"""A server under pressure, and what a batch that runs does about it: fewer in flight, and a count of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from airflow_provider_vllm.batch import tuning, waiting
from airflow_provider_vllm.batch.api import CHAT
from airflow_provider_vllm.batch.pauses import Pauses
from airflow_provider_vllm.batch.row import Row
from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import ForeignLink, read_rows, run, until
from tests.fakes.endpoint import ThreadedEndpoint


@pytest.mark.parametrize("status", [429, 503])
def test_refusals_shrink_what_is_in_flight(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, status: int
) -> None:
    """A server that holds 24 at once, and refuses more: every row is answered all the same."""
    server.behaviour.busy_above, server.behaviour.busy_status = 24, status
    server.behaviour.latency = 0.02
    spec = BatchSpec(prompts=[f"p{index}" for index in range(1500)], pack=1)
    began = time.monotonic()
    manifest = run(spec, link, tmp_path).manifest
    assert manifest.outcomes == {"ok": 1500}
    assert manifest.retries > 0
    assert manifest.concurrency < tuning.START / 2
    assert link.losses == []
    # 1.3 s without a refusal. Looking at its health for each 503, with all else waiting, would take a minute.
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_allows_fewer_than_asked_for_is_not_stormed(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, status: int
) -> None:
    """It refuses at once what it has no room for: each free place could be asked for thousands of times a second."""
    server.behaviour.busy_above, server.behaviour.busy_status = 24, status
    server.behaviour.latency = 0.1
    spec = BatchSpec(prompts=[f"p{index}" for index in range(1000)], pack=1, concurrency=64)
    began = time.monotonic()
    manifest = run(spec, link, tmp_path).manifest
    assert manifest.outcomes == {"ok": 1000}
    assert 40 <= manifest.retries < 700
    assert time.monotonic() - began < 30  # 4.2 s with 24 places full all the time


@pytest.mark.parametrize("concurrency", [1, 4, 64, "auto"])
def test_rows_that_are_always_refused_hold_up_no_other(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, concurrency: int | str
) -> None:
    """A gateway's 429 for what is larger than a quota, for one."""
    server.behaviour.latency = 0.002
    prompts = [f"p{index}" for index in range(1000)]
    for index in (0, 300, 600, 999):
        prompts[index] = f"[[status 429]] {index}"
    spec = BatchSpec(prompts=prompts, concurrency=concurrency, request_timeout=3, pack=1)  # type: ignore[arg-type]
    began = time.monotonic()
    manifest = run(spec, link, tmp_path).manifest
    assert manifest.outcomes == {"ok": 996, "failed": 4}
    assert time.monotonic() - began < 30
    assert link.losses == []


def test_no_row_is_given_up_while_others_are_answered(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """Four at a time, twenty a second, and all others are refused again and again for ten times their patience."""
    server.behaviour.busy_above, server.behaviour.latency = 4, 0.2
    spec = BatchSpec(
        prompts=[f"p{index}" for index in range(300)], pack=1, concurrency=256, request_timeout=1.5
    )
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 300}


def test_a_short_hiccup_is_soon_forgotten(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    server.behaviour.status, server.behaviour.latency = 429, 0.2
    timer = threading.Timer(1.0, lambda: setattr(server.behaviour, "status", None))
    timer.start()
    spec = BatchSpec(prompts=[f"p{index}" for index in range(1280)], pack=1, concurrency=64)
    began = time.monotonic()
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 1280}
    timer.join()
    assert time.monotonic() - began < 15  # 4 s without the hiccup


def test_a_place_that_becomes_free_is_used_at_once(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """Though every row that is left pauses: of 200 rows sent at once to a server for 4, nearly all do."""
    server.behaviour.busy_above, server.behaviour.latency = 4, 0.1
    spec = BatchSpec(prompts=[f"p{index}" for index in range(200)], pack=1, concurrency=256)
    began = time.monotonic()
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 200}
    assert time.monotonic() - began < 8  # 5 s with 4 places full all the time


def test_a_server_that_says_how_long_to_wait_is_not_asked_before(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    server.behaviour.busy_above, server.behaviour.latency = 4, 0.05
    server.behaviour.retry_after = 2
    spec = BatchSpec(prompts=[f"p{index}" for index in range(24)], pack=1, concurrency=64)
    manifest = run(spec, link, tmp_path).manifest
    assert manifest.outcomes == {"ok": 24}
    assert manifest.retries <= 24 * manifest.seconds / 2


def test_what_a_lost_server_asked_for_is_not_owed_to_the_next() -> None:
    pauses = Pauses()
    rows = [Row(number, "a", CHAT, b"{}", b"0" * 16) for number in range(4)]
    pauses.put(rows[0], 1e9, refused=True)
    pauses.put(rows[1], 2e9, refused=True, guessed=True)
    pauses.put(rows[2], 3e9)  # it failed by itself
    pauses.put(rows[3], 5e8, refused=True)
    pauses.end_refused()
    assert [row and row.number for row in (pauses.take() for _ in range(4))] == [3, 0, 1, None]
    assert pauses.refused == 0
    assert len(pauses) == 1
    pauses.wake(3e9)
    assert pauses.take() is rows[2]
    assert pauses.bytes == 0


@pytest.mark.parametrize("pack", [1, 4])
def test_a_server_that_refuses_everything_for_a_while(
    server: ThreadedEndpoint,
    link: ForeignLink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pack: int,
) -> None:
    monkeypatch.setattr(waiting, "PAUSING_BYTES", 50_000)
    server.behaviour.status = 429
    texts = [f"{index} {'x' * 500}" for index in range(2000)]
    spec = BatchSpec(prompts=texts, pack=pack, concurrency=16)

    def relent() -> None:
        until(lambda: server.behaviour.requests > 30)
        server.behaviour.status = None

    thread = threading.Thread(target=relent)
    thread.start()
    manifest = run(spec, link, tmp_path).manifest
    thread.join()
    assert manifest.outcomes == {"ok": 2000}
    assert 16 <= manifest.retries < 200


@pytest.mark.parametrize("status", [429, 503])
def test_a_pack_that_was_refused_stays_one(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, status: int
) -> None:
    """Its rows alone would be more requests for a server that has too many."""
    server.behaviour.busy_above, server.behaviour.busy_status = 24, status
    server.behaviour.latency = 0.02
    spec = BatchSpec(prompts=[f"p{index}" for index in range(1500)], pack=8, concurrency=64)
    manifest = run(spec, link, tmp_path).manifest
    assert manifest.outcomes == {"ok": 1500}
    assert manifest.retries > 0
    assert server.behaviour.requests - manifest.retries / 8 < 1500 / 4


def test_preemptions_shrink_it_and_are_counted(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """To the last: those of the moments before the end too."""
    behaviour = server.behaviour
    behaviour.latency, behaviour.preemptions = 0.05, 1000  # of an earlier batch
    spec = BatchSpec(
        prompts=[f"p{index}" for index in range(20_000)], pack=1, progress_interval=0.2
    )

    def preempt() -> None:
        for rows in (2000, 10_000, 19_990):
            until(lambda rows=rows: behaviour.requests >= rows)  # type: ignore[misc]
            behaviour.preemptions += 7

    thread = threading.Thread(target=preempt)
    thread.start()
    manifest = run(spec, link, tmp_path).manifest
    thread.join()
    assert manifest.outcomes == {"ok": 20_000}
    assert manifest.preemptions == 21
    assert manifest.concurrency < tuning.START


def test_a_short_batch_counts_its_preemptions_too(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    server.behaviour.latency = 0.3
    server.behaviour.preemptions = 5
    timer = threading.Timer(0.1, lambda: setattr(server.behaviour, "preemptions", 8))
    timer.start()
    source = tmp_path / "in.txt"
    source.write_text("a\nb\n")
    spec = BatchSpec(input_path=str(source), output_path=str(tmp_path / "out.jsonl"))
    assert run(spec, link, tmp_path).manifest.preemptions == 3
    timer.join()
    assert len(read_rows(tmp_path / "out.jsonl")) == 2
