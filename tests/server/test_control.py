"""The control endpoint: who gets in, and what a request can't do."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from airflow_provider_vllm.exceptions import ServerUnreachable
from airflow_provider_vllm.server import control
from airflow_provider_vllm.server.control import ControlClient, build_app, token_for

NONCE, OLD_NONCE = "0123456789abcdef", "fedcba9876543210"
KEY = "the-key-of-the-server"
TOKEN = token_for(KEY, NONCE)


@dataclass
class Door:
    """A control endpoint and what came through it."""

    port: int
    log: Path
    done: list[Any] = field(default_factory=list)

    @property
    def client(self) -> ControlClient:
        return ControlClient(f"http://127.0.0.1:{self.port}", TOKEN)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        token: str | None = TOKEN,
        **headers: str,
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        if token is not None:
            headers = {"Authorization": f"Bearer {token}", **headers}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        found = response.status, response.read()
        connection.close()
        return found


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    loop = asyncio.new_event_loop()
    done: list[Any] = []
    log = tmp_path / "vllm.log"
    app = build_app(
        token=TOKEN,
        log_file=log,
        status=lambda: {"state": "ready", "gpus": ("GPU-a",)},
        renew=lambda seconds: done.append(("renew", seconds)),
        release=lambda: done.append("release"),
        stop=lambda reason: done.append(("stop", reason)),
    )
    runner = web.AppRunner(app, access_log=None)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Door(runner.addresses[0][1], log, done)
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


ROUTES = [
    ("GET", "/status"),
    ("GET", "/log"),
    ("POST", "/renew"),
    ("POST", "/release"),
    ("POST", "/stop"),
]
WRONG = {
    "none": None,
    "empty": "",
    "of an earlier start": token_for(KEY, OLD_NONCE),
    "of another key": token_for("another", NONCE),
    "the key itself": KEY,
    "longer": TOKEN + "0",
    "shorter": TOKEN[:-1],
    "upper case": TOKEN.upper(),
    "no text": "\xff\xfe",
}


@pytest.mark.parametrize("token", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(
    ("method", "path"), [*ROUTES, ("GET", "/"), ("GET", "/nothing"), ("PUT", "/stop")]
)
def test_without_the_token_of_this_start_nothing_happens(
    door: Door, method: str, path: str, token: str | None
) -> None:
    door.log.write_text("secret line")
    status, body = door.ask(method, path, b"{}" if method == "POST" else None, token)
    assert (status, body) == (401, b'{"error": "unauthorized"}')
    assert door.done == []


@pytest.mark.parametrize("value", [TOKEN, f"Basic {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN}"])
def test_the_scheme_is_bearer(door: Door, value: str) -> None:
    assert door.ask("POST", "/stop", b"{}", None, Authorization=value)[0] == 401
    assert door.done == []


def test_a_token_in_the_query_or_a_cookie_is_none(door: Door) -> None:
    assert door.ask("GET", f"/status?token={TOKEN}", token=None)[0] == 401
    assert door.ask("GET", "/status", token=None, Cookie=f"token={TOKEN}")[0] == 401


def test_the_comparison_takes_constant_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    right = control.hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return right(one, other)

    monkeypatch.setattr(control.hmac, "compare_digest", compare)
    door.ask("GET", "/status", token="wrong")
    assert compared == [(b"Bearer wrong", f"Bearer {TOKEN}".encode())]


def test_a_token_tells_neither_key_nor_nonce() -> None:
    assert KEY not in TOKEN
    assert NONCE not in TOKEN
    assert len({TOKEN, *(token for token in WRONG.values() if token)}) == 8


def test_what_the_routes_do(door: Door) -> None:
    client = door.client
    assert client.status() == {"state": "ready", "gpus": ["GPU-a"]}
    client.renew()
    client.renew(1.5)
    client.release()
    client.stop("the batch is over")
    assert door.done == [("renew", None), ("renew", 1.5), "release", ("stop", "the batch is over")]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404), ("GET", "/etc/passwd", 404), ("GET", "/../../etc/passwd", 404), ("GET", "/log/", 404),
        ("GET", "/log/../state.json", 404), ("GET", "/%2e%2e/key", 404), ("GET", "/key", 404),
        ("GET", "/state.json", 404),
        ("HEAD", "/status", 405), ("POST", "/status", 405), ("GET", "/stop", 405), ("DELETE", "/stop", 405),
        ("PUT", "/renew", 405), ("OPTIONS", "/stop", 405), ("POST", "/log", 405), ("GET", "/stop/now", 404),
    ],
)  # fmt: skip
def test_there_are_five_routes_and_no_files(
    door: Door, method: str, path: str, status: int
) -> None:
    assert door.ask(method, path)[0] == status
    assert door.done == []


@pytest.mark.parametrize("query", ["?file=/etc/passwd", "?path=../key", "?offset=0&file=key"])
def test_no_path_from_a_request_is_opened(door: Door, query: str) -> None:
    door.log.write_text("the log")
    assert door.ask("GET", f"/log{query}") == (200, b"the log")


def test_reading_the_log_by_offset(door: Door) -> None:
    assert door.client.log() == (b"", 0)
    door.log.write_bytes(b"0123456789")
    assert door.client.log() == (b"0123456789", 10)
    assert door.client.log(7) == (b"789", 10)
    assert door.client.log(10) == (b"", 10)
    assert door.client.log(10**17) == (b"", 10)
    door.log.write_bytes(b"x" * (control.MAX_LOG + 5))
    body, size = door.client.log()
    assert (len(body), size) == (control.MAX_LOG, control.MAX_LOG + 5)


@pytest.mark.parametrize(
    "offset", ["-1", "x", "", "1.5", "%C2%B2", "%D9%A3", "1e3", "+1", "%201", "9" * 19, "9" * 5000]
)
def test_an_offset_that_is_no_number_of_bytes(door: Door, offset: str) -> None:
    status, body = door.ask("GET", f"/log?offset={offset}")
    assert (status, json.loads(body)) == (400, {"error": "offset has to be a number of bytes"})


@pytest.mark.parametrize("path", ["/renew", "/stop"])
@pytest.mark.parametrize(
    "body", [b"{", b"no", b"[]", b'"x"', b"7", b"null", b"\xff", b"[" * 60_000, b"\0"]
)
def test_a_body_that_is_no_json_object(door: Door, path: str, body: bytes) -> None:
    status, answer = door.ask("POST", path, body)
    assert (status, json.loads(answer)) == (400, {"error": "the body is no JSON object"})
    assert door.done == []


@pytest.mark.parametrize("path", ["/renew", "/stop"])
def test_a_body_is_64_kib_at_most(door: Door, path: str) -> None:
    fits = json.dumps({"reason": "x" * (control.MAX_BODY - 20)}).encode()
    assert len(fits) < control.MAX_BODY
    assert door.ask("POST", path, fits)[0] in (200, 202)
    door.done.clear()
    assert door.ask("POST", path, fits + b" " * 100)[0] == 413
    assert door.done == []


@pytest.mark.parametrize(
    "value", ["0", "-1", '"5"', "true", "[1]", "NaN", "Infinity", "-Infinity", "1e300", "1e999"]
)
def test_a_lease_is_a_finite_number_of_seconds(door: Door, value: str) -> None:
    status, _ = door.ask("POST", "/renew", f'{{"idle_timeout": {value}}}'.encode())
    assert status == 400
    assert door.done == []


def test_an_empty_body_is_right(door: Door) -> None:
    assert door.ask("POST", "/renew", b"")[0] == 200
    assert door.ask("POST", "/stop", b"")[0] == 202
    assert door.done == [("renew", None), ("stop", "asked")]


# -- the client --------------------------------------------------------------------------------


def test_a_refusal_is_an_error_without_the_token(door: Door) -> None:
    wrong = ControlClient(f"http://127.0.0.1:{door.port}", "not-the-token")
    with pytest.raises(ServerUnreachable, match="answered 401") as caught:
        wrong.stop("x")
    assert "not-the-token" not in str(caught.value)
    assert "not-the-token" not in repr(wrong)


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(ServerUnreachable, match="does not answer"):
        ControlClient("http://127.0.0.1:1", TOKEN, timeout=1).status()


@pytest.mark.parametrize("url", ["", "http://", "http://h", "http://h:x", "h:1", "http://[::1"])
def test_what_is_no_address_of_a_supervisor(url: str) -> None:
    with pytest.raises(ServerUnreachable, match="no address of a supervisor"):
        ControlClient(url, TOKEN)


def test_no_proxy_of_the_environment_sees_the_token(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert door.client.status()["state"] == "ready"
