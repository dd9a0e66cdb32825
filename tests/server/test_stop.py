"""Ending what is there, what is half there, and what belongs to another container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.exceptions import ServerError, StopFailed
from airflow_provider_vllm.server import state, stop
from airflow_provider_vllm.server.locks import file_lock
from airflow_provider_vllm.server.order import Order
from airflow_provider_vllm.server.processes import ProcessId, identity_of
from airflow_provider_vllm.server.state import GenerationDir, ServerState, StateRoot, write_private
from airflow_provider_vllm.server.stop import stop_generation, stop_server, sweep
from tests.server.conftest import Servers, fake_spec, wait_for


@pytest.fixture
def root(tmp_path: Path) -> StateRoot:
    return StateRoot(tmp_path / "vllm")


def start_of(root: StateRoot, server_id: str = "s", **fields: Any) -> GenerationDir:
    """The directory of a start with this state."""
    directory = root.new_generation(server_id)
    number, _, nonce = directory.path.name.partition("-")
    given: dict[str, Any] = {
        "host": state.socket.gethostname(),
        "pid_namespace": state.pid_namespace(),
        **fields,
    }
    directory.write_first(ServerState(server_id, int(number), nonce, **given))
    write_private(directory.key_file, "key")
    return directory


def aged(directory: GenerationDir, seconds: float) -> GenerationDir:
    then = time.time() - seconds
    for path in (
        directory.state_file,
        directory.path,
        directory.server_dir / "lock",
        directory.server_dir,
    ):
        if path.exists():
            os.utime(path, (then, then))
    return directory


# -- before there is anything ------------------------------------------------------------------


def test_nothing_to_stop(root: StateRoot) -> None:
    assert stop_server(root, "never-started", "test") == []


def test_a_start_that_has_not_written_anything_never_runs_after_its_stop(root: StateRoot) -> None:
    """The task was killed just after it had started the supervisor, which is still importing."""
    directory = root.new_generation("s")
    number, _, nonce = directory.path.name.partition("-")
    Order("s", int(number), nonce, fake_spec(), sys.executable, None, None).write(directory)
    write_private(directory.key_file, "key")
    assert [each.how for each in stop_server(root, "s", "test")] == ["already"]
    command = [sys.executable, "-m", "airflow_provider_vllm.server.supervisor", str(directory.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert "called off" in done.stdout
    found = directory.read()
    assert found
    assert (found.state, found.settled) == (state.STOPPED, True)
    assert not directory.log_file.exists()


def test_a_start_that_was_launched_just_now(servers: Servers) -> None:
    servers.launch(fake_spec({"never_ready": True}))
    began = time.monotonic()
    stop_server(servers.root, "s", "test")
    assert time.monotonic() - began < 5
    assert servers.tree() == []
    assert servers.state().state == state.STOPPED


# -- several at once ---------------------------------------------------------------------------


def at_once(*calls: Any) -> list[Any]:
    """The results of the calls, made at the same time; an exception is a result too."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as exc:
            results[number] = exc

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_stops_at_once(servers: Servers) -> None:
    running = servers.start(fake_spec({"ignore_term": True}))
    done = at_once(*[lambda: stop_generation(running.directory, "test")] * 3)
    assert not [each for each in done if isinstance(each, Exception)]
    assert servers.tree() == []
    assert servers.state().settled
    assert servers.state().state == state.STOPPED


def test_two_starts_of_one_server_at_once(servers: Servers) -> None:
    done = at_once(*[lambda: servers.launch(fake_spec())] * 2)
    assert sorted(each.generation for each in done) == [1, 2]
    older, newer = servers.root.generations("s")
    found = older.read()
    assert found
    assert (found.settled, found.state) == (True, state.STOPPED)
    wait_for(lambda: (current := newer.read()) and current.state == state.READY)


def test_stop_during_a_start_ends_it_and_the_start_says_so(servers: Servers) -> None:
    def stop_when_launched() -> None:
        wait_for(lambda: (newest := servers.root.newest("s")) and newest.read())
        stop_server(servers.root, "s", "marked failed")

    started, _ = at_once(
        lambda: servers.start(fake_spec({"never_ready": True}, start_attempts=3)),
        stop_when_launched,
    )
    assert isinstance(started, ServerError)
    assert "marked failed" in str(started)
    assert len(servers.root.generations("s")) == 1
    assert servers.tree() == []


# -- a supervisor that is killed on the way ----------------------------------------------------


def test_a_supervisor_that_is_killed_while_it_stops(servers: Servers) -> None:
    running = servers.start(fake_spec({"ignore_term": True, "orphan_session": True}))
    supervisor = running.state.supervisor
    assert supervisor

    def kill_when_draining() -> None:
        wait_for(lambda: servers.state().state == state.DRAINING)
        supervisor.signal(signal.SIGKILL)

    stopped, _ = at_once(lambda: stop_generation(running.directory, "test"), kill_when_draining)
    assert stopped.state.settled
    assert servers.tree() == []


@pytest.mark.parametrize("recorded", [True, False])
def test_a_daemon_of_the_tree_is_found_when_supervisor_and_guard_were_killed(
    servers: Servers, tmp_path: Path, recorded: bool
) -> None:
    running = servers.start(fake_spec({"daemon": str(tmp_path / "pid"), "orphan_session": True}))
    wait_for(lambda: len(servers.state().tree) >= 4)
    daemon = int((tmp_path / "pid").read_text())
    current = servers.state()
    supervisor, guard = current.supervisor, current.guard
    assert supervisor
    assert guard
    supervisor.signal(signal.SIGSTOP)
    guard.signal(signal.SIGKILL)
    supervisor.signal(signal.SIGKILL)
    wait_for(lambda: not supervisor.alive)
    if not recorded:
        # As if they had been killed between the start of the guard and the first record of it.
        stop.write_json(
            running.directory.state_file, current.but(guard=None, engine=None, tree=()).to_json()
        )
    assert Path(f"/proc/{daemon}").exists()
    stop_server(servers.root, "s", "test")
    assert not [process for process in current.tree if process.alive]
    assert not Path(f"/proc/{daemon}").exists() or not ProcessId(daemon, 0).alive
    assert not [name for name in current.segments if Path("/dev/shm", name).exists()]


# -- another container, another host -----------------------------------------------------------


def test_one_that_lives_in_another_container_is_not_written_off(root: StateRoot) -> None:
    directory = start_of(
        root, pid_namespace="another", state=state.READY, control_url="http://127.0.0.1:1"
    )
    before = directory.state_file.read_bytes()
    with file_lock(directory.alive_file):
        with pytest.raises(StopFailed, match="another container"):
            stop_server(root, "s", "test")
        assert sweep(root, keep_failed_days=0) == []
    assert directory.state_file.read_bytes() == before


def test_one_of_before_a_reboot_is_settled(root: StateRoot) -> None:
    directory = start_of(root, pid_namespace="another", state=state.READY)
    assert [each.how for each in stop_server(root, "s", "test")] == ["already"]
    found = directory.read()
    assert found
    assert (found.state, found.settled, found.reason) == (state.FAILED, True, "supervisor_gone")


def test_one_of_another_host_is_left_alone(root: StateRoot) -> None:
    """A state root that several hosts share: what can't be seen from here may live there."""
    directory = start_of(root, host="elsewhere", pid_namespace="another", state=state.READY)
    before = directory.state_file.read_bytes()
    assert [each.how for each in stop_server(root, "s", "test")] == ["unknown"]
    assert sweep(root, keep_failed_days=7) == []
    assert directory.state_file.read_bytes() == before


@pytest.mark.parametrize(("days", "kept"), [(1.0, True), (8.0, False)], ids=["young", "old"])
@pytest.mark.parametrize("host", ["here", "elsewhere"])
@pytest.mark.parametrize("settled", [True, False])
def test_directories_go_after_keep_failed_days(
    root: StateRoot, host: str, settled: bool, days: float, kept: bool
) -> None:
    then = time.time() - days * 86400
    there = {} if host == "here" else {"host": "elsewhere", "pid_namespace": "another"}
    directory = aged(
        start_of(root, settled=settled, state=state.FAILED, ended_at=then, **there), days * 86400
    )
    swept = sweep(root, keep_failed_days=7)
    assert len(swept) == (host == "here" and not settled)
    # One of this host that was not settled is looked after now, and removed by a later sweep.
    assert directory.path.exists() == (kept or (host == "here" and not settled))


def test_a_directory_without_a_state_goes_when_it_can_be_no_start(root: StateRoot) -> None:
    young, old = root.new_generation("young"), aged(root.new_generation("old"), 200)
    # Its clock was put on by minutes while it starts.
    starting = aged(root.new_generation("starting"), 200)
    with root.server_lock("starting"):
        sweep(root, keep_failed_days=7)
    assert young.path.exists()
    assert not old.path.exists()
    assert starting.path.exists()


def test_an_empty_folder_goes_unless_its_lock_is_held(root: StateRoot) -> None:
    for name in ("free", "held"):
        with root.server_lock(name):
            pass
        old = time.time() - 200
        os.utime(root.server_dir(name), (old, old))
    with root.server_lock("held"):
        os.utime(root.server_dir("held"), (time.time() - 200,) * 2)
        sweep(root, keep_failed_days=7)
        assert root.server_dir("held").exists()
    assert not root.server_dir("free").exists()


def test_a_state_that_makes_no_sense_does_not_hold_up_others(root: StateRoot) -> None:
    broken = root.new_generation("broken")
    broken.state_file.write_text('{"state": "ready"}')
    start_of(root, "dead", state=state.READY)
    assert [found.server_id for found in sweep(root, keep_failed_days=7)] == ["dead"]


# -- what can go wrong -------------------------------------------------------------------------


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    ) as process:
        yield process
        process.kill()


def test_a_pid_that_is_used_again_is_not_touched(
    root: StateRoot, bystander: subprocess.Popen
) -> None:
    reused = ProcessId(bystander.pid, 1)
    start_of(
        root, state=state.READY, supervisor=reused, guard=reused, engine=reused, tree=(reused,)
    )
    stop_server(root, "s", "test")
    assert bystander.poll() is None


def test_a_full_disk_does_not_undo_a_stop(root: StateRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    start_of(root, state=state.READY)

    def full(path: Path, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stop, "write_json", full)
    [stopped] = stop_server(root, "s", "test")
    assert stopped.state
    assert stopped.state.settled


def test_what_stays_alive_is_named(
    root: StateRoot, bystander: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that hangs in a driver: here, one that no signal is sent to."""
    start_of(root, state=state.READY, engine=identity_of(bystander.pid))
    monkeypatch.setattr(ProcessId, "signal", lambda self, number: False)
    monkeypatch.setattr(stop.remains.end, "__kwdefaults__", {"below": None, "timeout": 0.1})
    with pytest.raises(StopFailed, match=rf"Processes {bystander.pid} of the server s.*vllm\.log"):
        stop_server(root, "s", "test")
