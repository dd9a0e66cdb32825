"""VllmHook: connections in all their forms, the client, and what `test_connection` says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from airflow_provider_vllm import VllmHook
from airflow_provider_vllm.exceptions import InvalidInput, ServerUnreachable
from airflow_provider_vllm.hooks.vllm import base_url_of
from scripts.airflow_config import free_port
from tests.fakes.endpoint import Behaviour, ThreadedEndpoint

KEY = "k3y"


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedEndpoint]:
    with ThreadedEndpoint(Behaviour(models=("tiny", "adapter"), api_key=KEY)) as found:
        yield found


class Connect:
    """Sets the connection `vllm_default` and returns a hook for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._set = monkeypatch.setenv

    def __call__(self, **fields: Any) -> VllmHook:
        self._set("AIRFLOW_CONN_VLLM_DEFAULT", json.dumps({"conn_type": "vllm", **fields}))
        return VllmHook()


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    return Connect(monkeypatch)


# -- forms of a connection ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"host": "gpu-host", "port": 8000}, "http://gpu-host:8000"),
        ({"host": "gpu-host"}, "http://gpu-host"),
        ({"host": "gpu-host", "port": 8000, "schema": "https"}, "https://gpu-host:8000"),
        ({"host": "https://gpu-host", "port": 8000}, "https://gpu-host:8000"),
        ({"host": "https://gpu-host:8443/"}, "https://gpu-host:8443"),
        ({"host": "https://gpu-host:8443", "port": 8000}, "https://gpu-host:8443"),
        (
            {"host": "https://gateway/models/llama", "port": 8000},
            "https://gateway:8000/models/llama",
        ),
        ({"host": "http://gpu-host:8000/v1"}, "http://gpu-host:8000"),
        ({"host": " gpu-host/ ", "port": 8000}, "http://gpu-host:8000"),
        ({"host": "[::1]", "port": 8000}, "http://[::1]:8000"),
        ({"host": "http://[::1]:8001", "port": 8000}, "http://[::1]:8001"),
    ],
)
def test_hosts_and_ports(connect: Connect, fields: dict[str, Any], url: str) -> None:
    hook = connect(**fields, extra={"model": "m"})
    assert hook.endpoint().base_url == url
    assert str(hook.get_conn().base_url) == f"{url}/v1/"


def test_an_uri_as_people_put_it_into_the_environment(
    monkeypatch: pytest.MonkeyPatch, server: ThreadedEndpoint
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SOME", f"vllm://:{KEY}@127.0.0.1:{server.port}/?model=tiny")
    hook = VllmHook("some")
    assert hook.endpoint().base_url == server.base_url
    assert hook.test_connection()[0]


def test_without_a_host(connect: Connect) -> None:
    with pytest.raises(InvalidInput, match="'vllm_default' has no host: give for example"):
        connect().get_conn()
    good, message = connect().test_connection()
    assert not good
    assert "has no host" in message


# -- the client --------------------------------------------------------------------------------


def test_the_client_talks_to_the_server(connect: Connect, server: ThreadedEndpoint) -> None:
    client = connect(host="127.0.0.1", port=server.port, password=KEY).get_conn()
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "[[say hello]]"}]
    )
    assert answer.choices[0].message.content == "hello"


def test_the_timeout_of_the_connection(connect: Connect) -> None:
    assert connect(host="h", extra={"timeout": 7}).get_conn().timeout == 7
    assert connect(host="h").get_conn().timeout == 600


def test_the_model_is_the_extra_or_the_first_that_is_served(
    connect: Connect, server: ThreadedEndpoint
) -> None:
    fields = {"host": "127.0.0.1", "port": server.port, "password": KEY}
    assert connect(**fields).endpoint().model == "tiny"
    endpoint = connect(**fields, extra={"model": "adapter"}).endpoint()
    assert endpoint.model == "adapter"
    assert endpoint.api_key == KEY
    assert KEY not in repr(endpoint)


# -- test_connection ---------------------------------------------------------------------------


def test_a_good_connection(connect: Connect, server: ThreadedEndpoint) -> None:
    hook = connect(host="127.0.0.1", port=server.port, password=KEY, extra={"model": "adapter"})
    assert hook.test_connection() == (True, f"{server.base_url} serves tiny, adapter")


def test_a_wrong_key(connect: Connect, server: ThreadedEndpoint) -> None:
    good, message = connect(
        host="127.0.0.1", port=server.port, password="s3cret-guess"
    ).test_connection()
    assert not good
    assert "refuses the key (HTTP 401)" in message
    assert "s3cret-guess" not in message


def test_nothing_listens(connect: Connect) -> None:
    port = free_port()
    good, message = connect(host="127.0.0.1", port=port).test_connection()
    assert not good
    assert message.startswith(
        f"The server of connection 'vllm_default' at http://127.0.0.1:{port} does not list"
    )
    assert "refused" in message


def test_a_wrong_model(connect: Connect, server: ThreadedEndpoint) -> None:
    fields = {"host": "127.0.0.1", "port": server.port, "password": KEY}
    good, message = connect(**fields, extra={"model": "llama"}).test_connection()
    assert not good
    assert message == f"{server.base_url} serves tiny, adapter, not llama (extra `model`)"


@pytest.mark.parametrize(
    ("host", "port", "schema", "url"),
    [
        ("gpu", 8000, None, "http://gpu:8000"),
        ("https://gpu/", None, None, "https://gpu"),
        ("gpu:9000", 8000, None, "http://gpu:9000"),
        ("http://gpu/base/v1", 8000, None, "http://gpu:8000/base"),
        ("::1", 8000, None, "http://[::1]:8000"),
        ("[::1]", 8000, "https", "https://[::1]:8000"),
        ("http://user:secret@gpu", 8000, None, "http://gpu:8000"),
        (" ", 8000, None, None),
    ],
)
def test_urls_of_connections(
    host: str, port: int | None, schema: str | None, url: str | None
) -> None:
    assert base_url_of(host, port, schema) == url


def test_a_key_that_no_header_carries_is_refused_without_showing_it(connect: Connect) -> None:
    with pytest.raises(InvalidInput) as caught:
        connect(host="gpu", password="secret\nX").get_conn()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["abc", -1, "nan", "inf", [1]])
def test_a_timeout_that_is_no_number_of_seconds(connect: Connect, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"'vllm_default': extra `timeout` is .*seconds above 0"):
        connect(host="gpu", extra={"timeout": wrong}).get_conn()


def test_a_model_that_is_no_text(connect: Connect) -> None:
    with pytest.raises(InvalidInput, match=r"'vllm_default': extra `model` is \['m'\]"):
        connect(host="gpu", extra={"model": ["m"]}).endpoint()


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "http://"}, {"host": "http://:8000"}, {"host": "ftp://gpu"}, {"host": "a b"},
        {"host": "gpu", "port": 99999}, {"host": "http://gpu:x"}, {"host": "http://gpu?x=1"},
        {"host": "http://gpu#x"}, {"host": "http://gpu/a b"}, {"host": "exämple..invalid"},
        {"host": "gpu", "schema": "grpc"}, {"host": "http://[::1"},
    ],
)  # fmt: skip
def test_a_host_that_makes_no_url(connect: Connect, fields: dict[str, Any]) -> None:
    hook = connect(**fields)
    for ask in (hook.check, hook.endpoint, hook.get_conn):
        with pytest.raises(
            InvalidInput, match=r"'vllm_default' (has no host|makes the URL).*: give"
        ):
            ask()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"<html>", "something else than a list of models"),
        (b"{", "something else than a list of models"),
        (b"\xff\xfe", "something else than a list of models"),
        (b"[1]", "something else than a list of models"),
        (b"null", "something else than a list of models"),
        (b'{"data": "x"}', "something else than a list of models"),
        (b'{"data": [1]}', "something else than a list of models"),
        (b'{"data": [{"id": null}]}', "something else than a list of models"),
        (b'{"data": [{"id": 7}]}', "something else than a list of models"),
        (b"[" * 100_000, "something else than a list of models"),
        (b'{"data": []}', "serves nothing: it lists no model yet"),
        (b"{}", "serves nothing: it lists no model yet"),
    ],
)
def test_a_server_of_another_kind(connect: Connect, answer: bytes, said: str) -> None:
    with answering(answer) as port:
        hook = connect(host="127.0.0.1", port=port)
        with pytest.raises(ServerUnreachable, match=said):
            hook.check()
        assert hook.test_connection()[0] is False


@pytest.mark.parametrize("fields", [{}, {"extra": {"model": "tiny"}}])
def test_health_counts_as_a_batch_counts_it(connect: Connect, fields: dict[str, Any]) -> None:
    behaviour = Behaviour()
    with ThreadedEndpoint(behaviour) as server:
        hook = connect(host="127.0.0.1", port=server.port, **fields)
        for status in (200, 404):  # no vLLM, but it answers
            behaviour.health = status
            assert hook.check() == f"{server.base_url} serves tiny"
        behaviour.health = 503
        with pytest.raises(ServerUnreachable, match="not healthy: /health says HTTP 503"):
            hook.check()
        assert hook.test_connection()[0] is False


@contextmanager
def answering(body: bytes) -> Iterator[int]:
    """The port of a server that answers everything with `body`, said to be JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
