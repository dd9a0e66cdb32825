"""Processes by identity, on real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.environment import START_MARK
from airflow_provider_vllm.server import processes
from airflow_provider_vllm.server.processes import (
    ProcessId,
    Stat,
    ask_each,
    descendants,
    identity_of,
    kill,
    marked,
    read_stat,
    this_process,
    tree_of,
    writes_to,
)
from tests.server.conftest import wait_for

SLEEP = "import time; time.sleep(60)"


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that are ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str = SLEEP, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code], **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def identity(process: subprocess.Popen) -> ProcessId:
    found = identity_of(process.pid)
    assert found
    return found


def test_a_process_is_its_pid_and_its_start(start: Start) -> None:
    mine = identity(start())
    assert mine.alive
    assert ProcessId.from_json(mine.to_json()) == mine
    reused = ProcessId(mine.pid, mine.start - 1)
    assert not reused.alive
    assert not reused.signal(signal.SIGKILL)
    assert kill([reused], timeout=1) == []
    assert mine.alive


@pytest.mark.parametrize("value", [None, 1, "1", [1], [1, "2"], [1, 2, 3], {}, [None, None]])
def test_what_is_no_identity(value: object) -> None:
    assert ProcessId.from_json(value) is None


def test_a_zombie_is_dead(start: Start) -> None:
    process = start("pass")
    found = identity(process)
    wait_for(lambda: (stat := read_stat(process.pid)) and stat.state == "Z")
    assert not found.alive
    assert not found.signal(signal.SIGTERM)
    assert process.pid not in [stat.pid for stat in descendants(os.getpid())]


def test_a_stopped_process_is_alive_and_can_be_killed(start: Start) -> None:
    process = start()
    found = identity(process)
    found.signal(signal.SIGSTOP)
    wait_for(lambda: (stat := read_stat(process.pid)) and stat.state == "T")
    assert found.alive
    assert kill([found], timeout=5) == []
    assert not found.alive


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        found = identity_of(process.pid)
    assert found is not None
    assert not found.alive
    assert read_stat(process.pid) is None
    assert identity_of(process.pid) is None
    assert not found.signal(signal.SIGTERM)


def test_a_name_with_parentheses_and_spaces(start: Start) -> None:
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) R (b 1', 0, 0, 0); time.sleep(60)"
    process = start(code)
    wait_for(lambda: (stat := read_stat(process.pid)) and stat.name == "a) R (b 1")
    stat = read_stat(process.pid)
    assert stat
    assert (stat.parent, stat.state in "RS") == (os.getpid(), True)


def test_a_circle_in_a_table_ends() -> None:
    table = [Stat(pid, "x", "S", parent, 1, 1, 1) for pid, parent in ((2, 3), (3, 2), (4, 3))]
    assert {stat.pid for stat in descendants(2, table)} == {2, 3, 4}


def test_the_tree_is_found_by_record_log_session_and_mark(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with log.open("wb") as out:
        leader = start(
            f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '{SLEEP}']); time.sleep(60)",
            start_new_session=True,
        )
        writer = start(stdout=out, stderr=subprocess.DEVNULL)
    mine = start(env={**os.environ, START_MARK: "0123456789abcdef"}, start_new_session=True)
    stranger = start(env={**os.environ, START_MARK: "fedcba9876543210"})
    wait_for(lambda: len(descendants(leader.pid)) == 1)
    child = descendants(leader.pid)[0].pid

    def tree(**given: object) -> set[int]:
        known: dict = {"recorded": [], "session": None, "log_paths": [], "nonce": None, **given}
        return {stat.pid for stat in tree_of(**known)}

    assert tree() == set()
    assert tree(recorded=[identity(leader)]) == {leader.pid, child}
    assert tree(recorded=[ProcessId(leader.pid, 1)]) == set()
    # A session's number alone proves nothing: it may be another's by now.
    assert tree(session=leader.pid) == set()
    child_id = identity_of(child)
    assert tree(recorded=[child_id], session=leader.pid) == {leader.pid, child}
    assert tree(log_paths=[log]) == {writer.pid}
    assert tree(nonce="0123456789abcdef") == {mine.pid}
    log.rename(tmp_path / "elsewhere")
    assert writes_to(writer.pid, tmp_path / "elsewhere")
    (tmp_path / "elsewhere").unlink()
    assert writes_to(writer.pid, tmp_path / "elsewhere")
    assert marked([mine.pid, stranger.pid], "fedcba9876543210") == {stranger.pid}
    assert child_id
    kill([child_id], timeout=5)


def test_the_caller_is_never_part_of_a_tree(tmp_path: Path) -> None:
    assert os.getpid() not in {stat.pid for stat in tree_of([this_process()], os.getsid(0), [])}


def test_kill_names_who_does_not_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody can end, as one that hangs in a driver: here, one that gets no signal."""
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        found = identity(process)
        monkeypatch.setattr(ProcessId, "signal", lambda self, number: False)
        began = time.monotonic()
        assert kill([found], timeout=0.2) == [found]
        assert time.monotonic() - began < 1
        process.kill()


@pytest.fixture
def never(tmp_path: Path) -> Iterator[Callable[[], bytes]]:
    """A read that waits until the test is over, as the memory files of a process stuck in the kernel do."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    yield lambda: fifo.read_bytes()
    os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))


def test_who_does_not_answer_does_not_hold_up_the_others(never: Callable[[], bytes]) -> None:
    began = time.monotonic()
    found = ask_each(
        range(10), lambda pid: never() if pid in (0, 4, 9) else b"%d" % pid, patience=0.1
    )
    assert set(found) == {1, 2, 3, 5, 6, 7, 8}
    assert time.monotonic() - began < 2
    began = time.monotonic()
    assert ask_each(range(1000), lambda pid: never(), patience=0.1, timeout=0.4) == {}
    assert time.monotonic() - began < 2


def test_a_stuck_process_is_found_and_killed_with_the_others(
    start: Start, never: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {**os.environ, START_MARK: "0123456789abcdef"}
    stuck, other = start(start_new_session=True), start(env=environ)
    read = processes.read_memory_file
    monkeypatch.setattr(
        processes,
        "read_memory_file",
        lambda pid, name: never() if pid == stuck.pid else read(pid, name),
    )
    began = time.monotonic()
    tree = tree_of([identity(stuck)], None, [], "0123456789abcdef")
    assert {stat.pid for stat in tree} == {stuck.pid, other.pid}
    assert kill([stat.identity for stat in tree], timeout=5) == []
    assert time.monotonic() - began < 5
