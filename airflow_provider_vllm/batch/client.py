"""Requests in, replies out, many at a time over kept connections: libcurl's multi interface, one thread.

libcurl was the fastest of the libraries measured, takes the least CPU a request, and brings TLS, proxies
(`HTTPS_PROXY`, `NO_PROXY`) and connection reuse with it. Invariants: no Python code runs inside a libcurl callback, so
that nothing raised can be swallowed there; the key goes only into the header of a request; what libcurl itself refuses
is the end of a request, and never an exception of `send` or `poll`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import ssl
import time
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import pycurl

from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.reply import Kind, Reply
from airflow_provider_vllm.exceptions import BatchFailed

CONNECT_TIMEOUT = 20.0
STEP = 0.1
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SELECTABLE = 900  # select() in libcurl's interface sees no descriptor above 1023
URL, POSTFIELDS, RESPONSE_CODE = pycurl.URL, pycurl.POSTFIELDS, pycurl.RESPONSE_CODE
BURST = 32  # replies at a time: few enough to stay in a processor's cache until they are written
FEW = 4
# Where few come at a time, as from one step of an engine, a moment later there are some more, and to look for replies
# costs much more than a reply: half of the CPU of a row.
GATHER = 0.001
UNLIMITED = 1 << 20
SPARE_FILES = 100
OTHER_FILES = 50  # that are opened while a batch runs, and are no connection
FILES_OF_A_REQUEST = 8  # its connection, and what libcurl wakes itself with
MOST_ANSWER = 1 << 28  # bytes: one that has no end would take the memory of all
HIDDEN = b"***"
NUMBERS = {
    pycurl.E_COULDNT_CONNECT: Kind.UNSENT,
    pycurl.E_COULDNT_RESOLVE_HOST: Kind.UNSENT,
    pycurl.E_COULDNT_RESOLVE_PROXY: Kind.UNSENT,
    pycurl.E_OPERATION_TIMEDOUT: Kind.TIMEOUT,
    pycurl.E_FILESIZE_EXCEEDED: Kind.REJECTED,
    pycurl.E_URL_MALFORMAT: Kind.FATAL,
    pycurl.E_UNSUPPORTED_PROTOCOL: Kind.FATAL,
    pycurl.E_SSL_CACERT: Kind.FATAL,
    pycurl.E_PEER_FAILED_VERIFICATION: Kind.FATAL,
    pycurl.E_SSL_CACERT_BADFILE: Kind.FATAL,
    pycurl.E_SSL_CERTPROBLEM: Kind.FATAL,
}
FAULTS = (pycurl.error, ValueError, MemoryError)  # what libcurl's interface raises


class Transfer:
    """One handle of libcurl and what belongs to it, which is slow to reach as an attribute of the handle."""

    __slots__ = ("chunks", "curl", "tag", "url")

    def __init__(self, curl: Any) -> None:
        self.curl = curl
        self.url = ""
        self.chunks: list[bytes] = []
        self.tag: Any = None
        curl.setopt(pycurl.WRITEFUNCTION, self.chunks.append)


class Client:
    """Sends to one endpoint. Not thread-safe."""

    def __init__(self, endpoint: Endpoint, timeout: float, connections: int = 64) -> None:
        self._base = endpoint.base_url.rstrip("/")
        self._endpoint = endpoint
        self._secrets = _secrets(endpoint.api_key)
        self._timeout_ms = max(1, int(timeout * 1000))
        self._connections, self._made = connections, 0
        self._multi = self._new_multi()
        self._free: list[Transfer] = []
        self._busy: dict[Any, Transfer] = {}  # by handle
        self._unsent: list[Reply] = []
        self._trickles = False

    def send(self, url: str, body: bytes, tag: Any) -> None:
        """Start a POST; `tag` comes back with its reply."""
        try:
            transfer = self._free.pop() if self._free else self._new()
            curl = transfer.curl
            if transfer.url != url:
                curl.setopt(URL, (self._base + url).encode())
                transfer.url = url
            curl.setopt(POSTFIELDS, body)
        except FAULTS as error:
            self._unsent.append(_refused(tag, error))
            return
        try:
            self._multi.add_handle(curl)
        except FAULTS as error:
            self._unsent.append(Reply(tag, 0, fault=Kind.UNSENT, message=_said(error)))
            return
        transfer.tag = tag
        self._busy[curl] = transfer

    def poll(self, wait: float) -> tuple[list[tuple[Any, bytes]], list[Reply]]:
        """Move all transfers on, waiting up to `wait` seconds for the first end.

        Returns `(tag, body)` of each request that ended with status 200, and a `Reply` of each other; where many
        ended at once, of some, and of the rest the next time.
        """
        good: list[tuple[Any, bytes]] = []
        others, self._unsent = self._unsent, []
        try:
            self._move(0.0 if others else wait, good, others)
        except FAULTS as error:
            said = _said(error)
            others += [Reply(tag, 0, fault=Kind.DOUBTFUL, message=said) for tag in self.abort()]
            self._start_over()
        return good, others

    def rest(self) -> tuple[list[tuple[Any, bytes]], list[Reply]]:
        """What ended and was not told by `poll` yet; nothing is moved on."""
        good: list[tuple[Any, bytes]] = []
        others, self._unsent = self._unsent, []
        with contextlib.suppress(*FAULTS):
            _, ended, failed = self._multi.info_read(UNLIMITED)
            self._end(ended, failed, good, others)
        return good, others

    def _move(self, wait: float, good: list[tuple[Any, bytes]], others: list[Reply]) -> None:
        multi, most = self._multi, max(BURST, len(self._busy) // 8)
        multi.perform()
        _, ended, failed = multi.info_read(most)
        if not ended and not failed:
            if not self._busy:
                time.sleep(wait)
                return
            ready = multi.select(wait if len(self._busy) < SELECTABLE else min(wait, 0.005))
            if self._trickles or not ready:  # it does not wait where it sees no descriptor
                time.sleep(GATHER)
            multi.perform()
            _, ended, failed = multi.info_read(most)
            self._trickles = len(ended) < FEW < len(self._busy)
        self._end(ended, failed, good, others)

    def _end(
        self,
        ended: list[Any],
        failed: list[Any],
        good: list[tuple[Any, bytes]],
        others: list[Reply],
    ) -> None:
        remove, free, end = self._multi.remove_handle, self._free.append, self._busy.pop
        busy = self._busy
        for curl in ended:
            remove(curl)
            transfer = busy[curl]
            chunks = transfer.chunks
            body = chunks[0] if len(chunks) == 1 else b"".join(chunks)  # while it is still busy
            end(curl)
            chunks.clear()
            if (status := curl.getinfo(RESPONSE_CODE)) == 200:
                good.append((transfer.tag, body))
            else:
                after = float(curl.getinfo(pycurl.RETRY_AFTER) or 0)
                for secret in self._secrets:  # which a bad server or a proxy may name
                    body = body.replace(secret, HIDDEN)
                others.append(Reply(transfer.tag, status, body, retry_after=after))
            free(transfer)
        for curl, number, message in failed:
            remove(curl)
            transfer = end(curl)
            transfer.chunks.clear()
            fault = NUMBERS.get(number, Kind.DOUBTFUL)
            # libcurl sends again by itself when a kept connection was dead: what it says of the last
            # attempt is not what the server has seen.
            if fault is Kind.TIMEOUT and not curl.getinfo(pycurl.REQUEST_SIZE):
                fault = Kind.UNSENT
            elif fault is Kind.UNSENT and curl.getinfo(pycurl.REQUEST_SIZE):
                fault = Kind.DOUBTFUL
            elif number == pycurl.E_FILESIZE_EXCEEDED:
                message = f"the answer has more than {MOST_ANSWER >> 20} MiB"
            others.append(Reply(transfer.tag, 0, fault=fault, message=message))
            free(transfer)

    def abort(self) -> list[Any]:
        """Drop every request in flight with its connection; their tags."""
        tags = [transfer.tag for transfer in self._busy.values()]
        tags += [reply.tag for reply in self._unsent]
        for curl in self._busy:
            with contextlib.suppress(pycurl.error):
                self._multi.remove_handle(curl)
            curl.close()
        self._busy.clear()
        self._unsent.clear()
        return tags

    def close(self) -> None:
        self.abort()
        for transfer in self._free:
            transfer.curl.close()
        self._free.clear()
        self._multi.close()

    def _start_over(self) -> None:
        """New connections, where libcurl could not go on with those that it had."""
        with contextlib.suppress(pycurl.error):
            self.close()
        self._multi = self._new_multi()

    def _new_multi(self) -> Any:
        """Raises BatchFailed."""
        try:
            multi = pycurl.CurlMulti()
            multi.setopt(pycurl.M_MAXCONNECTS, self._connections + 8)
        except FAULTS as error:
            raise BatchFailed(
                f"no connection can be made: {_said(error)}; look at the limits of this process "
                "(ulimit -n, memory), and retry"
            ) from error
        return multi

    def _new(self) -> Transfer:
        curl = new_handle(self._endpoint, self._timeout_ms)
        curl.setopt(pycurl.POST, 1)
        self._made += 1
        if self._made > self._connections:
            self._connections *= 2
            self._multi.setopt(pycurl.M_MAXCONNECTS, self._connections + 8)
        return Transfer(curl)


def _secrets(key: str | None) -> tuple[bytes, ...]:
    """The key as text and as JSON may have it."""
    if not key:
        return ()
    forms = (key, *(json.dumps(key, ensure_ascii=ascii)[1:-1] for ascii in (True, False)))
    escaped = [form.replace("/", "\\/") for form in forms]
    found = {form.encode("utf-8", "replace") for form in (*forms, *escaped)}
    return tuple(sorted(found, key=len, reverse=True))


def _refused(tag: Any, error: BaseException) -> Reply:
    """The end of a request that libcurl did not take. What is no text for it is the URL or the key of the endpoint."""
    number = error.args[0] if isinstance(error, pycurl.error) and error.args else None
    fault = NUMBERS.get(number, Kind.UNSENT)
    if isinstance(error, ValueError):
        fault = Kind.FATAL
    return Reply(tag, 0, fault=fault, message=_said(error))


def _said(error: BaseException) -> str:
    """What libcurl says; of its multi interface the numbers mean something else than of a single request."""
    text = str(error.args[-1] if isinstance(error, pycurl.error) and error.args else error)
    return text or repr(error)


def new_handle(endpoint: Endpoint, timeout_ms: int) -> Any:
    """An easy handle with this endpoint's headers, TLS and proxy settings. Raises FAULTS."""
    curl = pycurl.Curl()
    headers = ["Content-Type: application/json", "Accept: application/json", "Expect:"]
    if endpoint.api_key:
        if any(char in endpoint.api_key for char in "\r\n\0"):
            raise ValueError("the key of the endpoint has a line break in it")
        headers.append(f"Authorization: Bearer {endpoint.api_key}")
    curl.setopt(pycurl.HTTPHEADER, [header.encode() for header in headers])
    curl.setopt(pycurl.USERAGENT, "airflow-provider-vllm")
    curl.setopt(pycurl.NOSIGNAL, 1)
    curl.setopt(pycurl.TIMEOUT_MS, timeout_ms)
    curl.setopt(pycurl.CONNECTTIMEOUT_MS, int(min(CONNECT_TIMEOUT * 1000, timeout_ms)))
    curl.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
    curl.setopt(pycurl.TCP_KEEPALIVE, 1)
    curl.setopt(pycurl.MAXFILESIZE_LARGE, MOST_ANSWER)
    if urlsplit(endpoint.base_url).hostname in LOOPBACK:
        curl.setopt(pycurl.PROXY, "")
    if (bundle := _ca_bundle()) is not None:
        curl.setopt(pycurl.CAINFO, bundle)
    return curl


def request(
    endpoint: Endpoint, url: str, timeout: float, body: bytes | None = None
) -> tuple[int, bytes]:
    """One blocking GET or POST: status and body; status 0 and the reason where no answer came.

    It waits in short steps, so that a signal's handler runs at once.
    """
    try:
        return _request(endpoint, url, timeout, body)
    except FAULTS as error:  # no descriptor is free, for example
        return 0, _said(error).encode()


def most_connections() -> int:
    """How many connections the limit of open files allows, with some left beside those that are open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = SPARE_FILES
    with contextlib.suppress(OSError):
        spare = max(spare, _open_files() + OTHER_FILES)
    return UNLIMITED if soft == resource.RLIM_INFINITY else max(1, soft - spare)


def out_of_files() -> bool:
    """Whether this process can open no connection: it could not tell a dead server from a living one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = _open_files()
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return soft != resource.RLIM_INFINITY and used + FILES_OF_A_REQUEST > soft


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _request(endpoint: Endpoint, url: str, timeout: float, body: bytes | None) -> tuple[int, bytes]:
    curl = new_handle(endpoint, max(1, int(timeout * 1000)))
    multi, buffer = pycurl.CurlMulti(), BytesIO()
    try:
        curl.setopt(URL, (endpoint.base_url.rstrip("/") + url).encode())
        curl.setopt(pycurl.WRITEFUNCTION, buffer.write)
        if body is not None:
            curl.setopt(POSTFIELDS, body)
        multi.add_handle(curl)
        while True:
            multi.perform()
            _, ended, failed = multi.info_read()
            if failed:
                return 0, str(failed[0][2]).encode()
            if ended:
                return int(curl.getinfo(RESPONSE_CODE)), buffer.getvalue()
            if not multi.select(STEP):
                time.sleep(GATHER)  # it does not wait where it sees no descriptor
    finally:
        multi.close()
        curl.close()


def _ca_bundle() -> str | None:
    """The CA file to trust: named by the environment, the system's, or certifi's. libcurl's wheel has no own."""
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if os.environ.get(name):
            return os.environ[name]
    system = ssl.get_default_verify_paths().cafile
    if system and os.path.exists(system):
        return system
    try:
        import certifi
    except ImportError:
        return None
    return str(certifi.where())
