"""The supervisor under faults: full disk, removed directory, signals, frozen parts, what gets away from its guard."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airflow_provider_vllm.exceptions import ServerError
from airflow_provider_vllm.server import state
from airflow_provider_vllm.server.order import Order
from airflow_provider_vllm.server.processes import ProcessId, identity_of
from airflow_provider_vllm.server.start import Running
from airflow_provider_vllm.server.state import write_private
from airflow_provider_vllm.server.stop import stop_server
from tests.server.conftest import Servers, fake_spec, wait_for


def supervisor_of(running: Running) -> ProcessId:
    assert running.state.supervisor
    return running.state.supervisor


def guard_of(running: Running) -> ProcessId:
    assert running.state.guard
    return running.state.guard


def engine_of(running: Running) -> ProcessId:
    assert running.state.engine
    return running.state.engine


# -- the disk ----------------------------------------------------------------------------------


def test_a_state_that_cannot_be_written_leaves_the_server_watched(servers: Servers) -> None:
    running = servers.start(fake_spec())
    file = running.directory.state_file
    file.unlink()
    file.mkdir()  # as a full disk: each write fails from now on
    engine_of(running).signal(signal.SIGKILL)
    wait_for(lambda: not [process for process in running.state.tree if process.alive])
    wait_for(lambda: not supervisor_of(running).alive)
    file.rmdir()


def test_what_could_not_be_written_is_written_later(servers: Servers) -> None:
    running = servers.start(fake_spec({"start_s": 0.1}, idle_timeout=60))
    file = running.directory.state_file
    file.unlink()
    file.mkdir()
    running.control.renew(2.0)
    time.sleep(0.7)
    status = running.control.status()
    assert status["state"] == state.READY
    file.rmdir()
    wait_for(lambda: running.directory.read())
    wait_for(lambda: servers.state().settled)
    assert servers.state().reason == "idle"


def test_a_directory_that_is_removed_ends_the_server(servers: Servers) -> None:
    running = servers.start(fake_spec({"orphan_session": True}))
    wait_for(lambda: len(servers.state().tree) >= 3)
    tree = servers.state().tree
    shutil.rmtree(running.directory.path)
    assert wait_for(lambda: not [process for process in tree if process.alive]) < 10
    wait_for(lambda: not supervisor_of(running).alive)


def test_a_start_without_its_key_is_none(servers: Servers) -> None:
    directory = servers.root.new_generation("s")
    number, _, nonce = directory.path.name.partition("-")
    Order("s", int(number), nonce, fake_spec(), sys.executable, None, None).write(directory)
    write_private(directory.key_file, "")
    command = [sys.executable, "-m", "airflow_provider_vllm.server.supervisor", str(directory.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "has no key" in done.stderr
    assert not directory.state_file.exists()


# -- signals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_an_orderly_stop(servers: Servers, number: int) -> None:
    running = servers.start(fake_spec())
    supervisor_of(running).signal(number)
    wait_for(lambda: servers.state().settled)
    assert (servers.state().state, servers.state().reason) == (state.STOPPED, "asked")
    assert servers.tree() == []


def test_a_signal_while_it_loads(servers: Servers) -> None:
    servers.launch(fake_spec({"never_ready": True}))
    supervisor = servers.state().supervisor
    assert supervisor
    supervisor.signal(signal.SIGTERM)
    assert wait_for(lambda: servers.state().settled) < 5
    assert servers.state().state == state.STOPPED
    assert servers.tree() == []


# -- what gets away from its guard -------------------------------------------------------------


def test_a_daemon_does_not_outlive_a_killed_guard(servers: Servers, tmp_path: Path) -> None:
    running = servers.start(fake_spec({"daemon": str(tmp_path / "pid")}))
    daemon = identity_of(int((tmp_path / "pid").read_text()))
    assert daemon
    guard_of(running).signal(signal.SIGKILL)
    wait_for(lambda: servers.state().settled)
    assert servers.state().reason == "guard_gone"
    assert not daemon.alive
    assert servers.tree() == []


def test_a_daemon_does_not_outlive_a_killed_supervisor(servers: Servers, tmp_path: Path) -> None:
    running = servers.start(fake_spec({"daemon": str(tmp_path / "pid")}))
    daemon = identity_of(int((tmp_path / "pid").read_text()))
    assert daemon
    supervisor_of(running).signal(signal.SIGKILL)
    assert wait_for(lambda: not daemon.alive, timeout=10) < 10


def test_a_supervisor_that_is_killed_while_it_loads(servers: Servers) -> None:
    servers.launch(fake_spec({"never_ready": True, "orphan_session": True}))
    wait_for(lambda: servers.state().engine)
    supervisor = servers.state().supervisor
    assert supervisor
    supervisor.signal(signal.SIGKILL)
    assert wait_for(lambda: not servers.tree(), timeout=10) < 10


# -- frozen parts ------------------------------------------------------------------------------


def test_a_frozen_guard_and_a_frozen_server_do_not_hold_up_a_stop(servers: Servers) -> None:
    running = servers.start(fake_spec())
    guard_of(running).signal(signal.SIGSTOP)
    engine_of(running).signal(signal.SIGSTOP)
    began = time.monotonic()
    stop_server(servers.root, "s", "test")
    assert time.monotonic() - began < 12
    assert servers.state().state == state.STOPPED
    assert servers.tree() == []


def test_a_server_that_freezes_while_it_loads_ends_with_the_timeout(servers: Servers) -> None:
    servers.launch(fake_spec({"never_ready": True}, startup_timeout=2))
    wait_for(lambda: servers.state().engine)
    engine = servers.state().engine
    assert engine
    engine.signal(signal.SIGSTOP)
    wait_for(lambda: servers.state().settled, timeout=25)
    assert servers.state().reason == "timeout"
    assert servers.tree() == []


@pytest.mark.full
def test_a_frozen_server_is_given_up(servers: Servers) -> None:
    """Half a minute without an answer, while its guard and its log say nothing."""
    running = servers.start(fake_spec())
    engine_of(running).signal(signal.SIGSTOP)
    wait_for(lambda: servers.state().settled, timeout=70)
    assert servers.state().reason == "api_frozen"
    assert servers.tree() == []


# -- where it listens --------------------------------------------------------------------------


def test_it_listens_on_the_address_of_the_spec_only(servers: Servers) -> None:
    running = servers.start(fake_spec(host="127.0.0.1"))
    assert listening(supervisor_of(running)) == {"127.0.0.1"}
    other = servers.launch(fake_spec(host="127.0.0.2"), "other")
    assert other.control_url.startswith("http://127.0.0.2:")
    supervisor = servers.state("other").supervisor
    assert supervisor
    assert listening(supervisor) == {"127.0.0.2"}


def test_an_address_that_is_not_ours_is_an_error(servers: Servers) -> None:
    with pytest.raises(ServerError, match="did not start"):
        servers.launch(fake_spec(host="192.0.2.1", auth_conn_id="key"))


def listening(process: ProcessId) -> set[str]:
    """The IPv4 addresses on which a process listens; no IPv6 at all."""
    inodes = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        target = str(link.readlink()) if link.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            found.add(socket.inet_ntoa(bytes.fromhex(words[1].partition(":")[0])[::-1]))
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        assert line.split()[9] not in inodes
    return found
