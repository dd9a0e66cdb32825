"""vLLM under its guard, seen from the supervisor: frozen guards, and an event loop that stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from airflow_provider_vllm.server import guarded, heartbeat
from airflow_provider_vllm.server.guarded import GUARD, GuardedProcess

SLEEP = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)",
]


def with_process(
    tmp_path: Path, do: Callable[[GuardedProcess], Awaitable[None]], command: list[str] = SLEEP
) -> GuardedProcess:
    """Start the command under a guard, do something, and end all."""

    async def run() -> GuardedProcess:
        process = GuardedProcess()
        try:
            await process.start(command, dict(os.environ), tmp_path / "log", ())
            await do(process)
        finally:
            await process.kill_tree()
            await process.close()
        return process

    process = asyncio.run(run())
    for identity in (process.guard, process.engine):
        assert not (identity and identity.alive)
    return process


async def nothing(process: GuardedProcess) -> None:
    assert process.engine
    assert process.engine.alive


def guard_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    script = tmp_path / "guard.py"
    script.write_text(code)
    monkeypatch.setattr(guarded, "GUARD", script)


def test_start_and_end(tmp_path: Path) -> None:
    began = time.monotonic()
    with_process(tmp_path, nothing)
    assert time.monotonic() - began < 3


def test_the_end_of_the_command_is_seen(tmp_path: Path) -> None:
    async def wait(process: GuardedProcess) -> None:
        await asyncio.wait_for(process.exited.wait(), 5)

    ended = with_process(tmp_path, wait, [sys.executable, "-c", "raise SystemExit(7)"])
    assert ended.exit_status == 7


def test_a_guard_that_is_frozen_before_it_starts_anything_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "BEAT_S", 0.1)
    code = (
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGSTOP)\n"
        f"os.execv(sys.executable, [sys.executable, {str(GUARD)!r}, *sys.argv[1:]])"
    )
    guard_script(monkeypatch, tmp_path, code)
    with_process(tmp_path, nothing)


def test_one_that_never_starts_anything_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "BEAT_S", 0.02)
    guard_script(monkeypatch, tmp_path, "import time\ntime.sleep(60)")
    with pytest.raises(OSError, match="ended before it started"):
        with_process(tmp_path, nothing)


def test_one_that_fails_at_once_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard_script(monkeypatch, tmp_path, "raise SystemExit('no')")
    with pytest.raises(OSError, match="ended before it started"):
        with_process(tmp_path, nothing)
    assert "no" in (tmp_path / "log").read_text()


def test_a_log_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        with_process(tmp_path, nothing)
    assert not (tmp_path / "elsewhere").exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_frozen_guard_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    async def freeze(process: GuardedProcess) -> None:
        assert process.guard
        process.guard.signal(signal.SIGSTOP)

    began = time.monotonic()
    with_process(tmp_path, freeze)
    assert time.monotonic() - began < 3


def test_a_loop_that_stands_still_for_a_while_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose disk takes its time."""
    monkeypatch.setattr(guarded, "SILENCE_S", 1.5)

    async def block(process: GuardedProcess) -> None:
        await asyncio.sleep(0.2)
        time.sleep(3)
        await asyncio.sleep(0.2)
        assert not process.guard_gone.is_set()
        assert process.engine
        assert process.engine.alive

    with_process(tmp_path, block)


def test_a_loop_that_never_runs_again_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "SILENCE_S", 1.5)
    monkeypatch.setattr(heartbeat, "STUCK_S", 1.0)

    async def block(process: GuardedProcess) -> None:
        await asyncio.sleep(0.2)
        assert process.engine
        deadline = time.monotonic() + 10
        while process.engine.alive:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    with_process(tmp_path, block)


def test_a_loop_that_stood_still_does_not_blame_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "BEATS_UNTIL_KILLED", 2)

    async def block(process: GuardedProcess) -> None:
        await asyncio.sleep(0.2)
        time.sleep(4)
        await asyncio.sleep(1.5)
        assert not process.guard_gone.is_set()

    with_process(tmp_path, block)
