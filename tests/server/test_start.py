"""A start that succeeds, one that fails, and one that meets a stranger."""

from __future__ import annotations

import json
import socket
import stat
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from airflow_provider_vllm.exceptions import PreflightFailed, StartFailed
from airflow_provider_vllm.server import state
from airflow_provider_vllm.server.processes import this_process
from tests.server.conftest import Servers, fake_spec, wait_for


def answer(url: str, key: str | None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_ready_means_our_server_answers_with_our_key(servers: Servers) -> None:
    running = servers.start(fake_spec())
    url = f"{running.state.base_url}/v1/models"
    assert (answer(url, running.key), answer(url, None)) == (200, 401)
    assert "launch 1 of 1" in servers.reports[0]
    assert any("ready" in line for line in servers.reports)


def test_stop_leaves_nothing_and_may_be_repeated(servers: Servers) -> None:
    running = servers.start(fake_spec())
    segments = servers.state().segments
    wait_for(lambda: servers.state().segments)
    segments = servers.state().segments
    running.stop("test")
    assert servers.tree() == []
    assert not [name for name in segments if Path("/dev/shm", name).exists()]
    assert servers.state().state == state.STOPPED
    running.stop("test")


def test_a_server_that_ignores_sigterm_is_killed(servers: Servers) -> None:
    running = servers.start(fake_spec({"ignore_term": True, "orphan_session": True}))
    running.stop("test")
    assert servers.tree() == []


def test_a_failed_start_carries_status_stage_log_and_cause(servers: Servers) -> None:
    plan = {"fail_at": "load weights", "fail_line": "ValueError: broken weights", "exit_status": 3}
    with pytest.raises(StartFailed) as caught:
        servers.start(fake_spec(plan))
    error = caught.value
    assert (error.exit_status, error.stage) == (3, "load weights")
    assert error.log_path and "broken weights" in Path(error.log_path).read_text()
    assert "ValueError: broken weights" in str(error)
    assert servers.tree() == []


def test_a_second_attempt_succeeds_and_the_evidence_of_the_first_stays(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_provider_vllm.server.start.BACK_OFF_S", 0.01)
    plan = {"fail_at": "warm up", "fail_times": 1, "counter": str(tmp_path / "n")}
    running = servers.start(fake_spec(plan, start_attempts=2))
    first, second = servers.root.generations("s")
    assert second.path == running.directory.path
    assert "failed to start" in first.log_file.read_text()
    found = first.read()
    assert found and found.state == state.FAILED


def test_a_start_that_hangs_ends_with_its_timeout(servers: Servers) -> None:
    with pytest.raises(StartFailed, match="startup_timeout"):
        servers.start(fake_spec({"never_ready": True}, startup_timeout=2))
    assert servers.tree() == []


def test_a_taken_port_is_left_for_another_one(servers: Servers, tmp_path: Path) -> None:
    plan = {"port_taken_times": 2, "counter": str(tmp_path / "n")}
    servers.start(fake_spec(plan))
    assert (tmp_path / "n").stat().st_size == 3
    assert len(list(servers.directory().path.glob("vllm.port-*.log"))) == 2


def test_an_explicit_port_that_is_taken_is_an_error(servers: Servers) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PreflightFailed, match=f"port {port}") as caught:
            servers.start(fake_spec(port=port))
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis["retry"]["launch"] is True, "its holder may end"
    assert servers.root.generations("s") == []


@pytest.mark.parametrize("stranger", ["keyless", "other", "model"])
def test_a_stranger_is_never_called_ready(servers: Servers, stranger: str) -> None:
    with pytest.raises(StartFailed, match="another server answers"):
        servers.start(fake_spec({"stranger": stranger}))


def test_files_are_private_and_the_key_is_on_no_command_line(servers: Servers) -> None:
    running = servers.start(fake_spec(env={"MY_TOKEN": "hidden-value"}))
    for path in servers.directory().path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    secrets = (running.key, "hidden-value")
    supervisor = running.state.supervisor
    assert supervisor is not None
    for pid in (*servers.tree(), supervisor.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert not any(secret in command for secret in secrets)
    public = json.dumps(running.handle.to_json())
    assert not any(secret in public for secret in secrets)
    logs = servers.directory().supervisor_log.read_text() + servers.directory().log_file.read_text()
    assert not any(secret in logs for secret in secrets)


def test_the_child_sees_no_secret_of_airflow(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "postgresql://user:hidden@db/airflow")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    servers.start(fake_spec())
    engine = servers.state().engine
    supervisor = servers.state().supervisor
    assert engine and supervisor
    for pid in (engine.pid, supervisor.pid):
        assert b"hidden" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_newer_start_supersedes_the_earlier_one(servers: Servers) -> None:
    first = servers.start(fake_spec(), owner=this_process())
    second = servers.start(fake_spec(), owner=this_process())
    found = first.directory.read()
    assert found and found.settled and found.state == state.STOPPED
    assert servers.state().state == state.READY
    first.stop("a late teardown of the first try")
    assert second.directory.path == servers.directory().path
    assert servers.state().state == state.READY


def test_an_interrupted_wait_ends_the_server(servers: Servers) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(line: str) -> None:
        if "load weights" in line:
            raise Interrupt

    from airflow_provider_vllm.server.launch import LaunchOptions
    from airflow_provider_vllm.server.start import start

    with pytest.raises(Interrupt):
        start(
            fake_spec({"never_ready": True}), "s", servers.root, LaunchOptions(), report=interrupt
        )
    assert servers.tree() == []
