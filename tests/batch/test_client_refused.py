"""What libcurl and the system refuse the client: descriptors, memory, an endpoint that is none."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pycurl
import pytest

from airflow_provider_vllm.batch.client import Client, most_connections, request
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.reply import Kind, classify
from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import BODY, CHAT, ForeignLink, OwnLink, poll_until_done, run, until
from tests.batch.matrix import journalled
from tests.fakes.endpoint import ThreadedEndpoint


def test_more_in_flight_than_select_can_see(server: ThreadedEndpoint) -> None:
    """select() knows descriptors up to 1023 only; the client polls more often beyond."""
    server.behaviour.latency = 0.1
    client = Client(Endpoint(server.base_url, "tiny"), 30)
    for tag in range(1200):
        client.send(CHAT, BODY, tag)
    good, others = poll_until_done(client, 1200)
    client.close()
    assert others == []
    assert len(good) == 1200


@contextmanager
def open_files(limit: int) -> Iterator[None]:
    """Another soft limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_more_connections_than_files_may_be_open(
    link: ForeignLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used = len(os.listdir("/proc/self/fd"))
    with open_files(used + 200):
        most = most_connections()
        assert most == used + 200 - max(100, used + 50)
        with caplog.at_level(logging.WARNING):
            one = BatchSpec(prompts=["a"] * 10, concurrency=4000)
            used_here = run(one, link, tmp_path).manifest.concurrency
        assert most - 10 <= used_here <= most  # its journal is open, too
        assert f"{used_here} is used" in caplog.text
    with open_files(90):
        assert most_connections() == 1


def test_a_request_without_a_free_descriptor_says_so() -> None:
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest)]  # no gap is left below
    try:
        with open_files(max(held) + 1):
            status, reason = request(Endpoint("http://127.0.0.1:9", "m"), "/health", 2)
    finally:
        for fd in held:
            os.close(fd)
    assert status == 0 and reason


@pytest.mark.parametrize(
    ("url", "key", "says"),
    [
        ("http://a\0b", None, "null byte"),
        ("http://[::", None, "IPv6"),
        ("", None, "URL"),
        ("gopher5://host", None, "not supported"),
        ("http://127.0.0.1:9", "two\r\nlines", "line break"),
    ],
)
def test_an_endpoint_that_libcurl_refuses_ends_the_request(
    url: str, key: str | None, says: str
) -> None:
    client = Client(Endpoint(url, "tiny", key), 5)
    client.send(CHAT, BODY, "tag")
    _, (reply,) = poll_until_done(client, 1)
    client.close()
    assert (reply.tag, classify(reply)) == ("tag", Kind.FATAL)
    assert re.search(says, reply.message)
    assert request(Endpoint(url, "tiny", key), "/health", 1)[0] == 0


class BrokenCurl:
    """A multi interface that refuses what the real one does when memory is short.

    3 is CURLM_OUT_OF_MEMORY; of a single request it would be a malformed URL, for which no retry can help.
    """

    def __init__(self, real: Any, name: str, times: int) -> None:
        self._real, self._name, self.left = real, name, times

    def __getattr__(self, name: str) -> Any:
        if name == self._name and self.left:
            self.left -= 1
            raise pycurl.error(pycurl.E_MULTI_OUT_OF_MEMORY, "Out of memory")
        return getattr(self._real, name)


@pytest.mark.parametrize("name", ["add_handle", "perform", "info_read", "remove_handle", "select"])
def test_what_libcurl_refuses_loses_no_request(server: ThreadedEndpoint, name: str) -> None:
    client = Client(Endpoint(server.base_url, "tiny"), 10)
    client._multi = broken = BrokenCurl(client._multi, name, 1)
    for tag in range(8):
        client.send(CHAT, BODY, tag)
    good, others = poll_until_done(client, 8)
    assert broken.left == 0
    assert sorted([tag for tag, _ in good] + [reply.tag for reply in others]) == list(range(8))
    expected = Kind.UNSENT if name == "add_handle" else Kind.DOUBTFUL
    assert {classify(reply) for reply in others} == {expected}
    assert "Out of memory" in others[0].message
    client.send(CHAT, BODY, "after")
    assert poll_until_done(client, 1)[0][0][0] == "after"
    client.close()


class Blind:
    """A multi interface whose requests all have descriptors that it cannot wait for."""

    def __init__(self) -> None:
        self.looks = 0

    def perform(self) -> None:
        self.looks += 1

    def info_read(self, most: int) -> tuple[int, list[Any], list[Any]]:
        return 0, [], []

    def select(self, wait: float) -> int:
        return 0

    def add_handle(self, curl: Any) -> None:
        pass

    def remove_handle(self, curl: Any) -> None:
        pass


def test_what_cannot_be_waited_for_takes_no_core(server: ThreadedEndpoint) -> None:
    client = Client(Endpoint(server.base_url, "tiny"), 10)
    real, client._multi = client._multi, Blind()
    client.send(CHAT, BODY, "a")
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        client.poll(0.05)
    assert client._multi.looks < 500
    client._multi = real
    client.close()


@pytest.mark.parametrize("pack", [1, 4])
def test_a_batch_survives_what_libcurl_refuses(
    link: ForeignLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: int
) -> None:
    """The second connection cannot be begun: its rows wait a little and go again."""
    real, calls = Client._new, iter(range(10_000))

    def refuse(client: Client) -> Any:
        if next(calls) == 1:
            raise pycurl.error(pycurl.E_OUT_OF_MEMORY, "Out of memory")
        return real(client)

    monkeypatch.setattr(Client, "_new", refuse)
    prompts = [f"p{index}" for index in range(100)]
    result = run(BatchSpec(prompts=prompts, concurrency=8, pack=pack), link, tmp_path)
    assert result.manifest.outcomes == {"ok": 100}
    assert result.manifest.retries > 0
    assert link.losses == []


def test_a_process_without_free_descriptors_waits_for_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is wrong with the server: it is not lost, and no row fails."""
    link = OwnLink(latency=0.02)
    taken: list[int] = []

    def starve() -> None:
        until(lambda: journalled(tmp_path) >= 20)
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        until(lambda: "can open no more files" in caplog.text)
        for fd in taken:
            os.close(fd)

    prompts = [f"[[reset]] {index}" if index % 3 == 0 else f"p{index}" for index in range(100)]
    with open_files(len(os.listdir("/proc/self/fd")) + 150), caplog.at_level(logging.WARNING):
        thief = threading.Thread(target=starve)
        thief.start()
        try:
            result = run(BatchSpec(prompts=prompts, concurrency=8, pack=1), link, tmp_path)
        finally:
            thief.join()
            link.kill()
    assert len(taken) > 100
    assert result.manifest.outcomes == {"ok": 100}
    assert link.losses == []
