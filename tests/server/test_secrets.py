"""Where the key of a server, the hub token and the values of `env` may be seen, and where not."""

from __future__ import annotations

import base64
import json
import os
import stat
import urllib.request
from pathlib import Path

import pytest

from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.exceptions import ServerError, VllmError
from airflow_provider_vllm.server import control
from airflow_provider_vllm.server.control import ControlClient, token_for
from airflow_provider_vllm.server.launch import LaunchOptions
from airflow_provider_vllm.server.order import Order
from airflow_provider_vllm.server.processes import descendants
from tests.server.conftest import Servers, fake_spec

KEY, HUB, VALUE = "secret-key-1f3d", "secret-hub-9a2c", "secret-value-77b0"
SECRETS = (KEY, HUB, VALUE)


def holds(text: str | bytes) -> list[str]:
    """Which of the secrets a text holds."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return [secret for secret in SECRETS if secret in text]


def test_none_is_in_a_repr() -> None:
    spec = fake_spec(env={"MY_TOKEN": VALUE})
    for thing in (
        spec,
        Order("s", 1, "0" * 16, spec, "python", None, None),
        LaunchOptions(key=KEY, hf_token=HUB),
        Endpoint("http://h:1", "m", KEY),
        ControlClient("http://h:1", KEY),
        {"spec": spec},
    ):
        assert holds(repr(thing) + str(thing)) == []


def test_each_is_seen_only_where_it_has_to_be(servers: Servers) -> None:
    """A whole life, with every option that holds a secret: command lines, files, logs, XCom, answers."""
    running = servers.start(
        fake_spec(env={"MY_TOKEN": VALUE}), key=KEY, hf_token=HUB, task="dag.task run try 1"
    )
    supervisor, engine = running.state.supervisor, running.state.engine
    assert supervisor
    assert engine
    for pid in (supervisor.pid, *(each.pid for each in descendants(supervisor.pid))):
        assert holds(Path(f"/proc/{pid}/cmdline").read_bytes()) == []
    assert sorted(holds(Path(f"/proc/{engine.pid}/environ").read_bytes())) == sorted(SECRETS)
    assert holds(Path(f"/proc/{supervisor.pid}/environ").read_bytes()) == [HUB]
    assert holds(repr(running) + str(running)) == []
    assert holds(json.dumps(running.handle.to_json())) == []
    assert holds(json.dumps(running.control.status())) == []
    running.stop("test")
    assert holds("\n".join(servers.reports)) == []
    seen = {
        path.name: holds(path.read_bytes())
        for path in running.directory.path.iterdir()
        if path.is_file()
    }
    assert seen.pop("key") == [KEY]
    assert seen.pop("spec.json") == [VALUE]
    assert not any(seen.values()), seen
    for path in [*running.directory.path.iterdir(), *servers.root.locks.iterdir()]:
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600, path


def test_the_key_of_each_start_is_random_and_has_256_bits(servers: Servers) -> None:
    keys = [servers.start(fake_spec()).key for _ in range(2)]
    assert keys[0] != keys[1]
    assert [len(base64.urlsafe_b64decode(f"{key}=")) for key in keys] == [32, 32]


def test_none_is_in_the_evidence_of_a_failure(servers: Servers) -> None:
    with pytest.raises(VllmError) as caught:
        servers.start(
            fake_spec({"fail_at": "load weights"}, env={"MY_TOKEN": VALUE}), key=KEY, hf_token=HUB
        )
    assert holds(str(caught.value) + repr(vars(caught.value)) + "\n".join(servers.reports)) == []
    directory = servers.directory().path
    for path in directory.rglob("*"):
        if path.is_file() and path.name not in ("key", "spec.json"):
            assert holds(path.read_bytes()) == [], path


def test_a_logged_command_line_of_the_supervisor_holds_none(servers: Servers) -> None:
    running = servers.start(fake_spec(env={"MY_TOKEN": VALUE}), key=KEY)
    assert "starting " in running.directory.supervisor_log.read_text()
    request = urllib.request.Request(f"{running.handle.control_url}/status")
    request.add_header("Authorization", f"Bearer {token_for(KEY, running.handle.nonce)}")
    with urllib.request.urlopen(request, timeout=5) as response:
        assert holds(response.read()) == []


def test_an_unreachable_supervisor_is_an_error_without_them() -> None:
    client = ControlClient("http://127.0.0.1:1", token_for(KEY, "0" * 16), timeout=1)
    with pytest.raises(ServerError) as caught:
        client.stop("x")
    assert holds(str(caught.value)) == []
    assert control.token_for(KEY, "0" * 16) not in str(caught.value)
