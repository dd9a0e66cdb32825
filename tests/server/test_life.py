"""The ends that nobody asked for: each is noticed, written down, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.server import state
from airflow_provider_vllm.server.processes import ProcessId, identity_of
from airflow_provider_vllm.server.start import Running
from airflow_provider_vllm.server.stop import stop_server, sweep
from tests.server.conftest import Servers, fake_spec, wait_for

GUARD_S = 10.0


def ended(servers: Servers) -> bool:
    return servers.state().settled


def supervisor_of(running: Running) -> ProcessId:
    assert running.state.supervisor
    return running.state.supervisor


def guard_of(running: Running) -> ProcessId:
    assert running.state.guard
    return running.state.guard


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_the_servers_own_end_is_written_within_half_a_second(servers: Servers, how: str) -> None:
    plan = {"die_after": 0.5, "die_how": how, "orphan_session": True}
    running = servers.start(fake_spec(plan))
    engine = running.state.engine
    assert engine
    wait_for(lambda: not engine.alive)
    assert wait_for(lambda: servers.state().state == state.FAILED) < 0.5
    wait_for(lambda: ended(servers))
    assert servers.state().exit_status == (7 if how == "exit" else -9)
    assert servers.tree() == []


def test_a_dead_engine_behind_a_living_server_is_written_within_one_and_a_half_seconds(
    servers: Servers,
) -> None:
    servers.start(fake_spec({"unhealthy_after": 0.7}))
    ready_at = servers.state().ready_at
    assert ready_at
    wait_for(lambda: servers.state().state == state.FAILED)
    ended_at = servers.state().ended_at
    assert ended_at and ended_at - ready_at < 0.7 + 1.5
    assert servers.state().reason == "engine_dead"
    wait_for(lambda: ended(servers))
    assert servers.tree() == []


def test_exit_status_zero_is_a_failure_too(servers: Servers) -> None:
    servers.start(fake_spec({"die_after": 0.3, "die_how": "engine"}))
    wait_for(lambda: ended(servers))
    assert servers.state().state == state.FAILED


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_supervisor_the_guard_ends_the_tree(servers: Servers, number: int) -> None:
    running = servers.start(fake_spec({"ignore_term": True, "orphan_session": True}))
    supervisor_of(running).signal(number)
    assert wait_for(lambda: not servers.tree(), timeout=GUARD_S) < GUARD_S
    if number == signal.SIGSTOP:
        supervisor_of(running).signal(signal.SIGCONT)
        wait_for(lambda: ended(servers))
        assert servers.state().reason == "guard_gone"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_without_its_guard_the_supervisor_ends_the_tree(servers: Servers, number: int) -> None:
    running = servers.start(fake_spec({"ignore_term": True, "orphan_session": True}))
    wait_for(lambda: len(servers.state().tree) >= 3)
    guard_of(running).signal(number)
    assert wait_for(lambda: not servers.tree(), timeout=GUARD_S) < GUARD_S
    wait_for(lambda: ended(servers))
    assert servers.state().state == state.FAILED


def test_with_both_killed_at_once_the_kernel_asks_the_server_to_end(servers: Servers) -> None:
    running = servers.start(fake_spec())
    wait_for(lambda: len(servers.state().tree) >= 3)
    supervisor_of(running).signal(signal.SIGSTOP)  # it must not see the guard's end
    guard_of(running).signal(signal.SIGKILL)
    supervisor_of(running).signal(signal.SIGKILL)
    assert wait_for(lambda: not servers.tree(), timeout=GUARD_S) < GUARD_S


def test_a_frozen_guard_is_woken(servers: Servers) -> None:
    running = servers.start(fake_spec())
    guard_of(running).signal(signal.SIGSTOP)

    def runs() -> bool:
        text = Path(f"/proc/{guard_of(running).pid}/stat").read_text()
        return text.rpartition(")")[2].split()[0] != "T"

    wait_for(lambda: not runs())
    wait_for(runs, timeout=15)
    assert servers.state().state == state.READY


@pytest.mark.parametrize("by", ["start", "stop", "sweep"])
def test_with_both_gone_the_next_start_or_stop_sweeps(servers: Servers, by: str) -> None:
    running = servers.start(fake_spec({"ignore_term": True, "orphan_session": True}))
    wait_for(lambda: len(servers.state().tree) >= 3)
    segments = servers.state().segments
    guard_of(running).signal(signal.SIGKILL)
    supervisor_of(running).signal(signal.SIGKILL)
    wait_for(lambda: not supervisor_of(running).alive)
    left = [process for process in running.directory.read().tree if process.alive]  # type: ignore[union-attr]
    assert left, "the engine outlives both"
    if by == "start":
        servers.start(fake_spec(), "another")
    elif by == "stop":
        stop_server(servers.root, "s", "test")
    else:
        assert [found.server_id for found in sweep(servers.root, keep_failed_days=7)] == ["s"]
    assert not [process for process in left if process.alive]
    assert not [name for name in segments if os.path.exists(f"/dev/shm/{name}")]
    assert servers.state("s").settled


def test_a_sweep_leaves_living_servers_and_removes_old_directories(servers: Servers) -> None:
    servers.start(fake_spec(), "living")
    servers.start(fake_spec(), "old").stop("test")
    time.sleep(0.05)
    sweep(servers.root, keep_failed_days=0.04 / 86400)
    assert servers.state("living").state == state.READY
    assert servers.root.generations("old") == []


def test_the_server_ends_with_the_process_that_owns_it(servers: Servers) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    servers.start(fake_spec(), owner=identity_of(owner.pid))
    owner.kill()
    owner.wait()
    wait_for(lambda: ended(servers))
    assert servers.state().reason == "owner_gone"
    assert servers.tree() == []


def test_a_released_server_outlives_its_owner(servers: Servers) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    running = servers.start(fake_spec(), owner=identity_of(owner.pid))
    running.control.release()
    owner.kill()
    owner.wait()
    with pytest.raises(pytest.fail.Exception):
        wait_for(lambda: ended(servers), timeout=2)


@pytest.mark.parametrize(
    ("limit", "reason"), [("idle_timeout", "idle"), ("max_lifetime", "max_lifetime")]
)
def test_a_lease_ends_the_server(servers: Servers, limit: str, reason: str) -> None:
    limits: dict[str, Any] = {limit: 2}
    servers.start(fake_spec(**limits))
    wait_for(lambda: ended(servers))
    assert (servers.state().state, servers.state().reason) == (state.STOPPED, reason)
    assert servers.tree() == []


def test_renewing_keeps_an_idle_server(servers: Servers) -> None:
    running = servers.start(fake_spec(idle_timeout=1.5))
    for _ in range(6):
        running.control.renew()
        time.sleep(0.5)
    assert servers.state().state == state.READY
    running.control.renew(0.3)
    wait_for(lambda: ended(servers))


def test_sigterm_to_the_supervisor_is_an_orderly_stop(servers: Servers) -> None:
    running = servers.start(fake_spec())
    supervisor_of(running).signal(signal.SIGTERM)
    wait_for(lambda: ended(servers))
    assert servers.state().state == state.STOPPED
    assert servers.tree() == []


def test_stop_of_a_frozen_supervisor(servers: Servers) -> None:
    running = servers.start(fake_spec())
    supervisor_of(running).signal(signal.SIGSTOP)
    began = time.monotonic()
    stop_server(servers.root, "s", "test")
    assert time.monotonic() - began < 15
    assert servers.tree() == []
