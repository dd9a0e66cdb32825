"""What the batch tests share: links to servers, a quick way to run a batch, rows to run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
from upath import UPath

from airflow_provider_vllm.batch.client import Client
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.extent import measure
from airflow_provider_vllm.batch.health import is_healthy
from airflow_provider_vllm.batch.reply import Reply
from airflow_provider_vllm.batch.row import Row
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.run import BatchResult, run_batch
from airflow_provider_vllm.batch.sources import find_sources, local_path, records
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import ServerLost
from airflow_provider_vllm.server.restarts import Restarts

FAKE = Path(__file__).parents[1] / "fakes" / "endpoint.py"
CHILD = Path(__file__).with_name("child.py")
LOG = logging.getLogger("batch-test")
CHAT = "/v1/chat/completions"


def to_path(text: str) -> Any:
    """As the operators do: a URL on fsspec's memory file system, or a local path."""
    return UPath(text) if "://" in text else local_path(text)


BODY = b'{"messages": [{"role": "user", "content": "hello"}]}'


class ForeignLink:
    """A server that somebody else runs: waited for when it is lost."""

    def __init__(self, base_url: str, model: str = "tiny", api_key: str | None = None) -> None:
        self.endpoint = Endpoint(base_url, model, api_key)
        self.renewed = self.connects = 0
        self.losses: list[str] = []
        self.patience = 20.0
        self.on_recover: Callable[[], None] = lambda: None

    def planned(self) -> Endpoint:
        return self.endpoint

    def connect(self) -> Endpoint:
        self.connects += 1
        return self.endpoint

    def renew(self) -> None:
        self.renewed += 1

    def recover(self, reason: str, *, by_row: bool = False, **_: object) -> Endpoint:
        self.losses.append(reason)
        self.on_recover()
        deadline = time.monotonic() + self.patience
        while (wrong := is_healthy(self.endpoint)) is not None:
            if time.monotonic() > deadline:
                raise ServerLost(f"{self.endpoint.base_url} did not come back: {wrong}")
            time.sleep(0.05)
        return self.endpoint


class OwnLink(ForeignLink):
    """A server of ours in a process of its own: started again when it is lost, by the operators' own rule."""

    def __init__(self, restarts: int = 2, **behaviour: Any) -> None:
        self.restarts = Restarts(restarts)
        self._arguments = [f"{key}={value}" for key, value in behaviour.items()]
        self.process = self._start()
        super().__init__(self._url)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(FAKE), *self._arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        self._url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        return process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def recover(self, reason: str, *, by_row: bool = False, **_: object) -> Endpoint:
        self.losses.append(reason)
        self.kill()
        if not self.restarts.take(time.monotonic(), by_row=by_row):
            raise ServerLost(f"the server died {len(self.losses)} times; it is not started again")
        self.process = self._start()
        self.endpoint = Endpoint(self._url, "tiny", owned=True)
        return self.endpoint


def run(spec: BatchSpec, link: ForeignLink, folder: Path, **more: Any) -> BatchResult:
    """Run a batch with its journal in `folder/journal`."""
    return run_batch(spec, link, journal_dir=str(folder / "journal"), log=LOG, **more)


def batch_row(name: str, prompt: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """An OpenAI batch row for the fake."""
    own = {"messages": [{"role": "user", "content": prompt}]} if url == CHAT else {"prompt": prompt}
    return {
        "custom_id": name,
        "method": "POST",
        "url": url,
        "body": {"model": "tiny", **own, **body},
    }


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines; bytes are written as they are."""
    with path.open("wb") as file:
        for row in rows:
            file.write(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n")
    return path


def read_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition; fails the test when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def start_child(
    folder: Path,
    base_url: str,
    spec: dict[str, Any],
    *,
    limit_bytes: int = 0,
    die_at: int = 0,
    prefix: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """A batch in a process of its own, which may be killed.

    `limit_bytes`: its largest file; `die_at`: the write before which it kills itself (-1: none, they are counted);
    `prefix`: the command that runs it.
    """
    arguments = {
        "spec": spec,
        "journal": str(folder),
        "url": base_url,
        "limit": limit_bytes,
        "die_at": die_at,
    }
    return subprocess.Popen(
        [*prefix, sys.executable, str(CHILD), json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def prompts_of(spec: BatchSpec) -> list[str]:
    """What each row asks, after checking that the count made before agrees."""
    sources = find_sources(spec, local_path)
    rows = list(RowMaker(spec, "m").rows(records(spec, sources)))
    assert measure(spec, sources).rows == len(rows)
    assert [row.number for row in rows] == list(range(len(rows)))
    bodies = [orjson.loads(row.body) for row in rows if isinstance(row, Row)]
    return [body["messages"][-1]["content"] for body in bodies]


def poll_until_done(client: Client, count: int) -> tuple[list[Any], list[Reply]]:
    """What comes back of so many requests, good and other."""
    good: list[Any] = []
    others: list[Reply] = []
    deadline = time.monotonic() + 10
    while len(good) + len(others) < count and time.monotonic() < deadline:
        some, bad = client.poll(0.05)
        good += some
        others += bad
    return good, others
