"""One server's life on real vLLM: start, ready, stop, and the deaths that vLLM itself does not clean up after."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_provider_vllm.server import state, temp
from airflow_provider_vllm.server.processes import Stat, descendants
from airflow_provider_vllm.server.start import Running
from airflow_provider_vllm.spec import ServerSpec
from tests.server.conftest import Servers, wait_for

pytestmark = pytest.mark.vllm


@pytest.fixture
def start(servers: Servers, vllm_python: Path, tiny_model: Path) -> Callable[[], Running]:
    """Starts the tiny model on the CPU until it is ready."""
    spec = ServerSpec(
        model=str(tiny_model),
        python=str(vllm_python),
        gpus=0,
        engine_args={"enforce_eager": True, "dtype": "float32", "max_model_len": 512},
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        startup_timeout=300,
        start_attempts=1,
    )
    return lambda: servers.start(spec)


def complete(running: Running, max_tokens: int, model: str = "") -> int:
    """Ask for that many tokens; the HTTP status, 0 where the connection broke."""
    body = {
        "model": model or running.state.model,
        "prompt": "a",
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{running.state.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {running.key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def requests_running(running: Running) -> float:
    """By vLLM's own count."""
    with urllib.request.urlopen(f"{running.state.base_url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return float(re.findall(r"^vllm:num_requests_running\S* (\S+)$", text, re.MULTILINE)[0])


def status_without_key(running: Running, path: str) -> int:
    try:
        with urllib.request.urlopen(f"{running.state.base_url}{path}", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def tree_of(running: Running) -> list[Stat]:
    assert running.state.guard
    return descendants(running.state.guard.pid)


def left(running: Running, tree: list[Stat], servers: Servers) -> list[str]:
    """What is still there of a server that ended."""
    found = [f"{each.pid} {each.name}" for each in tree if each.identity.alive]
    found += [
        f"/dev/shm/{name}" for name in servers.state().segments if Path("/dev/shm", name).exists()
    ]
    if (folder := temp.folder_of(servers.state().nonce)).exists():
        found.append(str(folder))
    return found + [str(pid) for pid in servers.tree()]


def test_it_answers_and_an_idle_stop_takes_under_3_s(
    start: Callable[[], Running], servers: Servers
) -> None:
    running = start()
    tree = tree_of(running)
    assert len(tree) >= 3
    assert any(path.is_socket() for path in temp.folder_of(running.state.nonce).iterdir())
    assert complete(running, 4) == 200
    assert complete(running, 4, running.handle.spec["model"]) == 200, (
        "its own name, as in files of run-batch"
    )
    # What SECURITY.md says of the key: the first is guarded, the others are not.
    guarded = [status_without_key(running, path) for path in ("/v1/models", "/v1/completions")]
    assert guarded == [401, 401]
    assert [status_without_key(running, path) for path in ("/health", "/metrics", "/version")] == [
        200
    ] * 3
    began = time.monotonic()
    running.stop("test")
    assert time.monotonic() - began < 3
    assert (servers.state().state, servers.state().settled) == (state.STOPPED, True)
    assert left(running, tree, servers) == []


def test_a_stop_with_requests_in_flight_takes_under_12_s(
    start: Callable[[], Running], servers: Servers
) -> None:
    running = start()
    tree = tree_of(running)
    ends: list[int] = []

    def keep_asking() -> None:
        while (status := complete(running, 500)) == 200:
            pass
        ends.append(status)

    clients = [threading.Thread(target=keep_asking) for _ in range(16)]
    for client in clients:
        client.start()
    wait_for(lambda: requests_running(running) > 0)
    began = time.monotonic()
    running.stop("test")
    assert time.monotonic() - began < 12
    assert left(running, tree, servers) == []
    for client in clients:
        client.join()
    assert set(ends) <= {0, 500, 503}


def test_a_killed_api_server_leaves_nothing(start: Callable[[], Running], servers: Servers) -> None:
    running = start()
    tree = tree_of(running)
    assert running.state.engine
    running.state.engine.signal(signal.SIGKILL)
    assert wait_for(lambda: servers.state().state == state.FAILED) < 0.5
    wait_for(lambda: servers.state().settled)
    assert servers.state().exit_status == -9
    assert left(running, tree, servers) == []


def test_a_killed_engine_is_noticed_within_1_5_s_and_exit_status_0_is_a_failure(
    start: Callable[[], Running], servers: Servers
) -> None:
    running = start()
    tree = tree_of(running)
    # /proc holds 15 characters of a name.
    [engine] = [each for each in tree if "EngineCor" in each.name]
    engine.identity.signal(signal.SIGKILL)
    assert wait_for(lambda: servers.state().state == state.FAILED) < 1.5
    wait_for(lambda: servers.state().settled, timeout=30)
    assert servers.state().reason in ("engine_dead", "exit")
    assert left(running, tree, servers) == []


@pytest.mark.full
def test_it_ends_with_its_supervisor_and_guard_when_both_are_killed_at_once(
    start: Callable[[], Running], servers: Servers
) -> None:
    running = start()
    tree = tree_of(running)
    supervisor, guard = running.state.supervisor, running.state.guard
    assert supervisor
    assert guard
    supervisor.signal(signal.SIGSTOP)  # it must not see the guard's end
    guard.signal(signal.SIGKILL)
    supervisor.signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(each.identity.alive for each in tree) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [each.name for each in tree if each.identity.alive] == []
