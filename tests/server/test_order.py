"""What a supervisor is told: the command line and the environment of vLLM, ports and keys."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from airflow_provider_vllm.environment import START_MARK
from airflow_provider_vllm.exceptions import InvalidSpec
from airflow_provider_vllm.server import order as order_module
from airflow_provider_vllm.server.interpreter import Interpreter
from airflow_provider_vllm.server.order import (
    Order,
    check_key,
    free_port,
    new_key,
    port_is_taken,
    url_of,
)
from airflow_provider_vllm.server.processes import ProcessId
from airflow_provider_vllm.server.state import StateRoot
from airflow_provider_vllm.spec import ServerSpec

NONCE = "0123456789abcdef"


def order(spec: ServerSpec) -> Order:
    return Order("s", 1, NONCE, spec, "/venv/bin/python", ProcessId(1, 2), "dag.task")


@pytest.fixture
def normal_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter with a vLLM of the usual build, which this machine need not have."""
    found = Interpreter("/venv/bin/python", "3.11.0", "vllm", "0.32.0", "2.13.0")
    monkeypatch.setattr(order_module, "inspect", lambda path: found)


def test_it_goes_through_its_file(tmp_path: Path) -> None:
    given = order(
        ServerSpec("m", engine_args={"x1": [1, {"a": 2}][0]}, env={"A": "b"}, gpus=("GPU-a",))
    )
    directory = StateRoot(tmp_path / "vllm").new_generation("s")
    given.write(directory)
    assert Order.read(directory) == given
    directory.spec_file.unlink()
    with pytest.raises(FileNotFoundError):
        Order.read(directory)


@pytest.mark.usefixtures("normal_vllm")
def test_the_command_line() -> None:
    spec = ServerSpec(
        "org/model", served_model_name="name", engine_args={"max_model_len": 1, "enforce_eager": True},
        lora_modules={"one": "--not-an-option"}, host="127.0.0.1",
    )  # fmt: skip
    words = order(spec).command(8000)
    assert words[:5] == [
        "/venv/bin/python",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        "org/model",
    ]
    assert words[5:13] == [
        "--served-model-name",
        "name",
        "org/model",
        "--host=127.0.0.1",
        "--port=8000",
        "--disable-uvicorn-access-log",
        "--max-model-len=1",
        "--enforce-eager",
    ]
    assert words[-2:] == ["--lora-modules", "one=--not-an-option"]
    assert "--enable-lora" in words


@pytest.mark.usefixtures("normal_vllm")
@pytest.mark.parametrize("spec", [ServerSpec("m"), ServerSpec("./-odd", served_model_name="odd")])
def test_a_model_is_served_under_its_own_name_too(spec: ServerSpec) -> None:
    words = order(spec).command(8000)
    if spec.model == spec.served_model_name:
        assert "--served-model-name=m" in words
    else:
        at = words.index("--served-model-name")
        assert words[at + 1 : at + 3] == ["odd", "./-odd"]


@pytest.mark.usefixtures("normal_vllm")
def test_the_access_log_can_be_had() -> None:
    spec = ServerSpec("m", engine_args={"disable-uvicorn-access-log": False})
    words = order(spec).command(8000)
    assert [word for word in words if "access-log" in word] == ["--no-disable-uvicorn-access-log"]


def test_a_command_of_the_users_own() -> None:
    spec = ServerSpec("{port}", command=("serve", "{model}", "--at={host}:{port}", "{other}"))
    assert order(spec).command(8000) == ["serve", "{port}", "--at=127.0.0.1:8000", "{other}"]


def test_the_environment() -> None:
    spec = ServerSpec("m", env={"PYTHONUNBUFFERED": "0", "MY_TOKEN": "x"}, startup_timeout=1000)
    worker = {
        "PATH": "/bin",
        "AIRFLOW__CORE__FERNET_KEY": "f",
        "VLLM_API_KEY": "old",
        START_MARK: "old",
    }
    assert order(spec).environ(worker, "key", {"CUDA_VISIBLE_DEVICES": "GPU-a"}) == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "0",
        "VLLM_API_KEY": "key",
        "CUDA_VISIBLE_DEVICES": "GPU-a",
        "VLLM_ENGINE_READY_TIMEOUT_S": "1000",
        "MY_TOKEN": "x",
        START_MARK: NONCE,
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_ports(host: str) -> None:
    port = free_port(host)
    assert not port_is_taken(host, port)
    with socket.socket() as listener:
        listener.bind((host, port))
        listener.listen()
        assert port_is_taken(host, port)


def test_a_port_where_nobody_can_listen_is_not_called_taken() -> None:
    with pytest.raises(InvalidSpec, match=r"192\.0\.2\.1.*can't listen there"):
        port_is_taken("192.0.2.1", 8000)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("::1", "http://[::1]:1"),
        ("gpu-host", "http://gpu-host:1"),
    ],
)
def test_urls(host: str, url: str) -> None:
    assert url_of(host, 1) == url


def test_keys() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert all(check_key(new_key()) for _ in range(100))
    assert check_key("p4ss-Word!~") == "p4ss-Word!~"


@pytest.mark.parametrize(
    "key", ["", "geheim wort", "geheim\n", "schlüssel", "ge\theim", "geheim\0", " geheim"]
)
def test_a_key_that_no_header_carries_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(InvalidSpec, match="auth_conn_id") as caught:
        check_key(key)
    assert "geheim" not in str(caught.value)
    assert "schl" not in str(caught.value)
