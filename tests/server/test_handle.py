"""Handles go through XCom and come back checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.exceptions import InvalidHandle
from airflow_provider_vllm.server.handle import ServerHandle
from airflow_provider_vllm.server.state import StateRoot
from airflow_provider_vllm.spec import ServerSpec


def values(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "vllm_server",
        "server_id": "some-dag-start-0123456789abcdef",
        "generation": 2,
        "nonce": "0123456789abcdef",
        "host": "gpu-host-7",
        "base_url": "http://127.0.0.1:8000",
        "control_url": "http://127.0.0.1:8001",
        "model": "tiny",
        "spec": ServerSpec("m/tiny", env={"A_TOKEN": "hidden", "B": "seen"}).public(),
        **changes,
    }


def test_round_trip_through_json() -> None:
    handle = ServerHandle.of(values())
    again = ServerHandle.of(json.loads(json.dumps(handle.to_json())))
    assert again == handle
    assert ServerHandle.of(again) is again
    assert ServerSpec.of(again.spec).model == "m/tiny"


def test_a_handle_holds_no_secret_of_the_spec() -> None:
    text = json.dumps(ServerHandle.of(values()).to_json())
    assert "hidden" not in text
    assert "seen" in text


@pytest.mark.parametrize(
    "base_url", [None, "http://10.0.0.1:1", "http://gpu-host:80", "http://[::1]:80"]
)
def test_addresses_that_are_right(base_url: str | None) -> None:
    assert ServerHandle.of(values(base_url=base_url)).base_url == base_url


@pytest.mark.parametrize(
    "server_id",
    [
        "../x",
        "a/../b",
        "a/b",
        "/etc",
        "..",
        ".",
        "",
        "a\0b",
        "a\n",
        "A",
        "-a",
        ".a",
        "a.",
        "a" * 121,
        "a b",
        7,
        None,
        ["a"],
    ],
)
def test_a_server_id_that_could_be_another_path_is_refused(server_id: object) -> None:
    with pytest.raises(InvalidHandle, match="no server id"):
        ServerHandle.of(values(server_id=server_id))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nonce", "0123"),
        ("nonce", "0123456789ABCDEF"),
        ("nonce", "0123456789abcdef\n"),
        ("nonce", "../../../../etc/"),
        ("nonce", 1),
        ("generation", "2"),
        ("generation", True),
        ("generation", 0),
        ("host", ""),
        ("host", None),
        ("model", 3),
        ("control_url", ""),
        ("control_url", "file:///etc/passwd"),
        ("control_url", "http://127.0.0.1:8001/../x"),
        ("control_url", "http://user:pass@127.0.0.1:8001"),
        ("control_url", "http://127.0.0.1"),
        ("control_url", "http://127.0.0.1:notaport"),
        ("control_url", "http://127.0.0.1:8001\r\nX: y"),
        ("base_url", "https://elsewhere:1"),
        ("spec", {"model": ""}),
        ("spec", {"model": "m", "no_such_field": 1}),
        ("spec", "m"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidHandle, match=field):
        ServerHandle.of(values(**{field: value}))


@pytest.mark.parametrize("value", [None, "x", 3, [], {}, {"kind": "other"}, values(kind=None)])
def test_what_is_no_handle_at_all(value: Any) -> None:
    with pytest.raises(InvalidHandle, match="no server handle"):
        ServerHandle.of(value)


def test_a_missing_field_is_named() -> None:
    given = values()
    del given["nonce"], given["model"]
    with pytest.raises(InvalidHandle, match="has no model, nonce"):
        ServerHandle.of(given)


def test_the_directory_is_that_of_its_own_start(tmp_path: Path) -> None:
    root = StateRoot(tmp_path / "root")
    first, second = root.new_generation("s"), root.new_generation("s")
    nonce = first.path.name.partition("-")[2]
    assert ServerHandle.of(values(server_id="s", nonce=nonce)).directory(root) == first
    assert first != second
    assert ServerHandle.of(values(server_id="s")).directory(root) is None
