"""An engine that freezes, its health good all the while: it is noticed, probed, and taken for lost.

Or it is only slow or busy, and is not.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch import health
from airflow_provider_vllm.batch.api import EMBEDDINGS
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.run import run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed
from airflow_provider_vllm.server import foreign
from airflow_provider_vllm.server.foreign import ForeignEndpoint
from tests.batch.helpers import LOG, ForeignLink, batch_row, run, until, write_rows
from tests.batch.matrix import check, spec_of
from tests.fakes.endpoint import ThreadedEndpoint


def of_a_file(source: Path) -> BatchSpec:
    """A batch that is soon out of patience."""
    return BatchSpec(
        input_path=str(source),
        output_path=str(source.with_name("out.jsonl")),
        concurrency=4,
        pack=1,
        stall_timeout=0.5,
        probe_timeout=0.5,
    )


def freeze_after(server: ThreadedEndpoint, rows: int) -> threading.Thread:
    """The engine stops when so many rows have come; the thread that does it, started."""

    def freeze() -> None:
        until(lambda: server.behaviour.prompts.total() >= rows)
        server.behaviour.frozen = True

    thread = threading.Thread(target=freeze)
    thread.start()
    return thread


@pytest.mark.parametrize("vllm", [True, False], ids=["counters", "no counters"])
def test_a_frozen_engine(
    server: ThreadedEndpoint,
    link: ForeignLink,
    tmp_path: Path,
    quiet: dict[str, bytes],
    vllm: bool,
) -> None:
    """Health, models and metrics stay good, and nothing moves."""
    server.behaviour.latency, server.behaviour.vllm = 0.01, vllm

    link.on_recover = lambda: setattr(server.behaviour, "frozen", False)
    thread = freeze_after(server, 150)
    run(spec_of(tmp_path, stall_timeout=0.6, probe_timeout=0.5), link, tmp_path)
    thread.join()
    assert len(link.losses) == 1
    assert "one-token probe failed" in link.losses[0]
    check(tmp_path, quiet)


def test_a_slow_engine_is_not_a_frozen_one(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    spec = BatchSpec(prompts=["[[slow 2]]"], stall_timeout=0.3, probe_timeout=1)
    result = run(spec, link, tmp_path)
    assert result.manifest.outcomes == {"ok": 1}
    assert link.losses == []
    assert server.behaviour.prompts["user: 1"] >= 1, "the probe was sent"


def test_a_foreign_server_that_stays_frozen_is_waited_for(
    server: ThreadedEndpoint,
    tmp_path: Path,
    quiet: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its list of models is good all the time: to be back it must answer, or each round blames its rows."""
    server.behaviour.latency = 0.01
    reports: list[str] = []
    probed: list[str | None] = []

    def probe(*asked: Any) -> str | None:
        said = real_probe(*asked)
        probed.append(said)
        failed = len(probed) - probed.count(None)
        server.behaviour.frozen = failed < 3  # the first one finds the freeze
        return said

    real_probe = health.probe
    monkeypatch.setattr(health, "probe", probe)
    monkeypatch.setattr(foreign, "TELL_S", 0.0)
    link = ForeignEndpoint(Endpoint(server.base_url, "tiny"), report=reports.append, patience=20)
    thread = freeze_after(server, 150)
    spec = spec_of(tmp_path, stall_timeout=0.6, probe_timeout=0.5)
    manifest = run_batch(spec, link, journal_dir=str(tmp_path / "journal"), log=LOG).manifest
    thread.join()
    assert [said is None for said in probed][-4:] == [False, False, False, True]
    assert manifest.server_losses == 1
    waits = [report for report in reports if report.startswith("still waiting for the server")]
    assert len(reports) == 1 + len(waits) == 3
    assert all("does not answer" in wait for wait in waits)
    check(tmp_path, quiet)


def test_a_foreign_server_that_is_frozen_for_good_fails_the_batch_and_no_row(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, quiet: dict[str, bytes]
) -> None:
    server.behaviour.latency = 0.01
    foreign = ForeignEndpoint(Endpoint(server.base_url, "tiny"), report=LOG.info, patience=2)
    thread = freeze_after(server, 150)
    spec = spec_of(tmp_path, stall_timeout=0.6, probe_timeout=0.5)
    with pytest.raises(
        BatchFailed, match=r"did not come back within 2 s.*does not answer"
    ) as caught:
        run_batch(spec, foreign, journal_dir=str(tmp_path / "journal"), log=LOG)
    thread.join()
    assert caught.value.manifest is not None
    assert set(caught.value.manifest["outcomes"]) <= {"ok", "rejected", "invalid_input"}
    server.behaviour.frozen = False
    run(spec, link, tmp_path)
    check(tmp_path, quiet)


def test_a_freeze_without_counters_is_noticed_among_many_in_flight(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """The patience is with the speed until the freeze: with that since, it would grow as fast as the freeze lasts."""
    server.behaviour.latency, server.behaviour.vllm = 0.01, False
    link.on_recover = lambda: setattr(server.behaviour, "frozen", False)
    prompts = [f"p{index}" for index in range(600)]
    spec = BatchSpec(prompts=prompts, concurrency=64, pack=1, stall_timeout=1, probe_timeout=0.5)
    thread = freeze_after(server, 200)
    began = time.monotonic()
    manifest = run(spec, link, tmp_path).manifest
    thread.join()
    assert manifest.outcomes == {"ok": 600}
    assert manifest.server_losses == 1
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("vllm", [True, False])
def test_a_freeze_is_noticed_before_every_row_has_timed_out(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, vllm: bool
) -> None:
    """All time out at once, and before they are sent anew nothing is in flight, which is no stillness."""
    server.behaviour.latency, server.behaviour.vllm = 0.01, vllm
    link.on_recover = lambda: setattr(server.behaviour, "frozen", False)
    prompts = [f"p{index}" for index in range(200)]
    spec = BatchSpec(prompts=prompts, concurrency=64, pack=1, request_timeout=4, probe_timeout=0.5)
    assert spec.stall_timeout > spec.request_timeout
    thread = freeze_after(server, 150)
    manifest = run(spec, link, tmp_path).manifest
    thread.join()
    assert manifest.outcomes == {"ok": 200}
    assert manifest.server_losses == 1


@pytest.mark.parametrize(
    ("status", "health_is", "lost"), [(503, 200, False), (503, 503, True), (500, 200, True)]
)
def test_a_probe_that_a_busy_server_refuses_is_no_loss(
    server: ThreadedEndpoint, status: int, health_is: int, lost: bool
) -> None:
    server.behaviour.status, server.behaviour.health = status, health_is
    said = health.probe(Endpoint(server.base_url, "tiny"), EMBEDDINGS, "tiny", 5.0)
    assert (said is not None) is lost


def test_the_probe_asks_where_the_rows_go(
    server: ThreadedEndpoint,
    link: ForeignLink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows name their URL themselves; a server of embeddings has no chat, and says so at once, frozen or not."""
    server.behaviour.latency = 0.01
    link.on_recover = lambda: setattr(server.behaviour, "frozen", False)
    probed: list[str] = []

    def probe(endpoint: Endpoint, url: str, model: str, deadline: float) -> str | None:
        probed.append(url)
        return real_probe(endpoint, url, model, deadline)

    real_probe = health.probe
    monkeypatch.setattr(health, "probe", probe)
    rows = [batch_row(f"id-{index}", "", EMBEDDINGS, input=f"p{index}") for index in range(100)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    spec = of_a_file(source)
    thread = freeze_after(server, 50)
    assert run(spec, link, tmp_path).manifest.outcomes == {"ok": 100}
    thread.join()
    assert probed == [EMBEDDINGS]


def test_the_log_says_which_rows_were_in_flight(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where they stand and how large they are, never what they ask."""
    server.behaviour.latency = 0.01
    link.on_recover = lambda: setattr(server.behaviour, "frozen", False)
    made = [batch_row(f"id-{index}", f"secret {index}") for index in range(200)]
    source = write_rows(tmp_path / "in.jsonl", made)
    spec = of_a_file(source)
    thread = freeze_after(server, 100)
    with caplog.at_level(logging.INFO):
        run(spec, link, tmp_path)
    thread.join()
    (line,) = [text for text in caplog.messages if "in flight and go back" in text]
    assert line.startswith(f"4 rows were in flight and go back to the queue: {source}:")
    spans = re.findall(r"in\.jsonl:(\d+)(?:-(\d+))?", line)
    numbers = [n for first, last in spans for n in range(int(first), int(last or first) + 1)]
    assert len(numbers) == 4
    assert 90 <= min(numbers) <= max(numbers) <= 190
    size = len(json.dumps(made[0]["body"], separators=(",", ":")))
    assert size <= int(line.rpartition(" to ")[2].split()[0]) <= size + 2
    assert "secret" not in caplog.text


def test_another_model_after_a_restart_is_never_mixed_in_silently(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The manifest counts the rows of each server, and a later try asks for the second one's again."""
    server.behaviour.latency = 0.01
    link.endpoint = first = replace(link.endpoint, fingerprint="one")

    def change() -> None:
        server.behaviour.frozen = False
        link.endpoint = replace(link.endpoint, fingerprint="two")

    link.on_recover = change
    prompts = [f"p{index}" for index in range(200)]
    spec = BatchSpec(prompts=prompts, concurrency=4, pack=1, stall_timeout=0.5, probe_timeout=0.5)
    thread = freeze_after(server, 100)
    with caplog.at_level(logging.WARNING):
        manifest = run(spec, link, tmp_path).manifest
    thread.join()
    assert "It is not the server that was lost: tiny (fingerprint two)" in caplog.text
    assert [each["fingerprint"] for each in manifest.answered_by] == ["one", "two"]
    by_first, by_second = (each["rows"] for each in manifest.answered_by)
    assert by_first + by_second == 200
    assert 90 <= by_first <= 190
    assert (manifest.server_losses, manifest.server_restarts) == (1, 1)

    link.endpoint = first
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = run(spec, link, tmp_path).manifest
    assert (again.reused, again.changed) == (by_first, by_second)
    assert f"{by_second} changed and run again (another server had answered" in caplog.text
    assert run(spec, link, tmp_path).manifest.reused == 200


@pytest.mark.parametrize("frozen", [False, True])
def test_a_late_word_of_the_health_is_no_death_where_a_token_comes(
    server: ThreadedEndpoint,
    link: ForeignLink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    frozen: bool,
) -> None:
    """The HTTP server of a busy vLLM may have no time for it, and a restart would cost every row in flight."""

    def late(endpoint: Endpoint) -> str | None:
        if link.losses:
            return None
        time.sleep(0.3)
        server.behaviour.frozen = frozen
        return "timed out"

    link.on_recover = lambda: setattr(server.behaviour, "frozen", False)
    monkeypatch.setattr(health, "LOOK_TIMEOUT", 0.4)
    monkeypatch.setattr(health, "is_healthy", late)
    prompts = ["[[once 500]]", *(f"[[slow 1]] {index}" for index in range(3))]
    spec = BatchSpec(prompts=prompts, concurrency=4, pack=1, probe_timeout=0.5 if frozen else 5)
    manifest = run(spec, link, tmp_path).manifest
    assert manifest.outcomes == {"ok": 4}
    assert manifest.server_losses == (1 if frozen else 0)
