"""The HTTP client: TLS, proxies, connection reuse, and what each kind of failure is called."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pycurl
import pytest
from aiohttp import web

from airflow_provider_vllm.batch.client import BURST, Client, request
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.reply import Kind, Reply, classify
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed
from tests.batch.helpers import BODY, CHAT, ForeignLink, poll_until_done, run, until
from tests.fakes.endpoint import Behaviour, ThreadedEndpoint, build_app
from tests.fakes.proxy import CuttingProxy


def one_failure(base_url: str, timeout: float = 5, body: bytes = BODY) -> Reply:
    client = Client(Endpoint(base_url, "tiny"), timeout)
    client.send(CHAT, body, "tag")
    good, others = poll_until_done(client, 1)
    client.close()
    assert not good
    return others[0]


def test_what_ended_and_was_not_told_is_the_rest() -> None:
    count = 3 * BURST
    with ThreadedEndpoint(Behaviour(latency=0.5)) as server:
        client = Client(Endpoint(server.base_url, "tiny"), 10, count)
        for tag in range(count):
            client.send(CHAT, BODY, tag)
        while server.behaviour.running < count:
            assert client.poll(0.01) == ([], []), "no reply may come before all are asked for"
        until(lambda: server.behaviour.running == 0)
        first, others = client.poll(1.0)
        rest, more = client.rest()
        unread = client.abort()
        client.close()
    assert not (others or more)
    assert len(first) <= BURST < len(first) + len(rest)
    assert sorted([*(tag for tag, _ in (*first, *rest)), *unread]) == list(range(count))


class TooLarge(list[bytes]):
    def __len__(self) -> int:
        raise MemoryError


def test_a_reply_that_memory_cannot_hold_is_the_end_of_its_request(
    server: ThreadedEndpoint,
) -> None:
    client = Client(Endpoint(server.base_url, "tiny"), 10)
    client.send(CHAT, BODY, "tag")
    (transfer,) = client._busy.values()
    transfer.chunks = TooLarge()
    good, others = poll_until_done(client, 1)
    client.close()
    assert not good
    assert [reply.tag for reply in others] == ["tag"]


def test_connections_are_kept(server: ThreadedEndpoint) -> None:
    with CuttingProxy(server.port) as proxy:
        client = Client(Endpoint(f"http://127.0.0.1:{proxy.port}", "tiny"), 10)
        for _ in range(20):
            for tag in range(8):
                client.send(CHAT, BODY, tag)
            good, _ = poll_until_done(client, 8)
            assert sorted(tag for tag, _ in good) == list(range(8))
        client.close()
    assert proxy.connections == 8


def test_an_aborted_request_is_given_back(server: ThreadedEndpoint) -> None:
    client = Client(Endpoint(server.base_url, "tiny"), 10)
    hang = b'{"messages": [{"role": "user", "content": "[[hang]]"}]}'
    for tag in range(5):
        client.send(CHAT, hang, tag)
    client.poll(0.2)
    assert sorted(client.abort()) == list(range(5))
    assert client.abort() == []
    client.send(CHAT, BODY, "after")
    assert poll_until_done(client, 1)[0][0][0] == "after"
    client.close()


def test_refused_is_unsent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert classify(one_failure(f"http://127.0.0.1:{port}")) is Kind.UNSENT
    assert classify(one_failure("http://no-such-host.invalid")) is Kind.UNSENT


def test_cut_off_is_doubtful(server: ThreadedEndpoint) -> None:
    body = b'{"messages": [{"role": "user", "content": "[[reset]]"}]}'
    reply = one_failure(server.base_url, body=body)
    assert classify(reply) is Kind.DOUBTFUL
    assert reply.message


def test_a_server_that_dies_between_two_requests_of_a_connection(server: ThreadedEndpoint) -> None:
    """libcurl sends again by itself and is refused; the row was sent all the same."""
    with CuttingProxy(server.port) as proxy:
        client = Client(Endpoint(f"http://127.0.0.1:{proxy.port}", "tiny"), 10)
        client.send(CHAT, BODY, 1)
        assert len(poll_until_done(client, 1)[0]) == 1
        client.send(CHAT, b'{"messages": [{"role": "user", "content": "[[slow 5]]"}]}', 2)
        client.poll(0.2)
        cutter = threading.Thread(target=proxy.cut, args=(1.0,))
        cutter.start()
        _, others = poll_until_done(client, 1)
        cutter.join()
        client.close()
    assert classify(others[0]) is Kind.DOUBTFUL


def test_time_outs(server: ThreadedEndpoint) -> None:
    body = b'{"messages": [{"role": "user", "content": "[[hang]]"}]}'
    assert classify(one_failure(server.base_url, 0.3, body)) is Kind.TIMEOUT


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Kind.REJECTED),
        (401, Kind.FATAL),
        (403, Kind.FATAL),
        (404, Kind.REJECTED),
        (408, Kind.BUSY),
        (413, Kind.REJECTED),
        (422, Kind.REJECTED),
        (429, Kind.BUSY),
        (500, Kind.DOUBTFUL),
        (502, Kind.DOUBTFUL),
        (503, Kind.DOUBTFUL),
        (501, Kind.REJECTED),
        (302, Kind.FATAL),
        (308, Kind.FATAL),
    ],
)
def test_kinds_of_statuses(status: int, kind: Kind) -> None:
    assert classify(Reply(None, status)) is kind


def certificate(folder: Path) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, in one file."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = folder / "server.pem"
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@contextmanager
def tls_server(pem: Path) -> Iterator[str]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(build_app(Behaviour()), access_log=None, shutdown_timeout=0.1)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    loop.run_until_complete(site.start())
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"https://127.0.0.1:{port}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(runner.cleanup())
    loop.close()


def test_tls_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = certificate(tmp_path)
    with tls_server(pem) as url:
        with pytest.raises(BatchFailed, match="certificate"):
            run(BatchSpec(prompts=["a"]), ForeignLink(url), tmp_path / "untrusted")
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        prompts = [f"p{index}" for index in range(50)]
        result = run(BatchSpec(prompts=prompts), ForeignLink(url), tmp_path / "trusted")
    assert result.manifest.outcomes == {"ok": 50}


def test_there_is_a_ca_file_to_trust() -> None:
    from airflow_provider_vllm.batch.client import _ca_bundle

    bundle = _ca_bundle()
    assert bundle is not None
    assert "BEGIN CERTIFICATE" in Path(bundle).read_text()


@pytest.fixture
def forward_proxy() -> Iterator[tuple[str, list[str]]]:
    """An HTTP proxy that answers by itself; the URLs that it was asked for."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split(b" ")[1].decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.run_until_complete(server.wait_closed())
    loop.close()


def test_a_proxy_of_the_environment_is_used(
    forward_proxy: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = forward_proxy
    monkeypatch.setenv("http_proxy", url)
    status, _ = request(Endpoint("http://vllm.invalid:8000", "m"), "/health", 5)
    assert status == 200
    assert asked == ["http://vllm.invalid:8000/health"]
    monkeypatch.setenv("no_proxy", "vllm.invalid")
    assert request(Endpoint("http://vllm.invalid:8000", "m"), "/health", 5)[0] == 0


def test_loopback_never_goes_through_a_proxy(
    server: ThreadedEndpoint,
    forward_proxy: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    url, asked = forward_proxy
    monkeypatch.setenv("http_proxy", url)
    monkeypatch.setenv("all_proxy", url)
    result = run(BatchSpec(prompts=["a"]), ForeignLink(server.base_url), tmp_path)
    assert result.manifest.ok == 1
    assert asked == []


def test_libcurl_speaks_tls() -> None:
    assert "SSL" in pycurl.version or "TLS" in pycurl.version
