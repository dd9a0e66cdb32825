"""The kill matrix on real vLLM: by id and outcome, since texts depend on what was batched together.

One cell in the default run, `full` the others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.health import is_healthy, look
from airflow_provider_vllm.batch.run import run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.server.foreign import ForeignEndpoint
from airflow_provider_vllm.server.processes import every_process, kill
from tests.batch.helpers import (
    LOG,
    ForeignLink,
    batch_row,
    read_rows,
    start_child,
    until,
    write_rows,
)
from tests.batch.matrix import finish, journalled, killed_at
from tests.fakes.proxy import CuttingProxy

pytestmark = pytest.mark.vllm
ROWS = 400
FLAGS = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "512"]


class RealLink(ForeignLink):
    """A vLLM of ours on the CPU, started again when it is lost."""

    def __init__(self, python: Path, model: Path, log: Path, *flags: str) -> None:
        self._python, self._model, self._log = python, model, log
        self._flags = [*FLAGS, *flags]
        super().__init__(self._start(), model="m")

    def _start(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
        more = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", *self._flags]
        command += ["--model", str(self._model), "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**kept, **more}, stdout=log, stderr=log, start_new_session=True
            )
        url = f"http://127.0.0.1:{port}"
        until(lambda: self.process.poll() is not None or not is_healthy(Endpoint(url, "m")), 180)
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        return url

    def processes(self, name: str) -> list[int]:
        """The pids in the server's session whose name (15 characters of it) has this in it."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):
                head, _, rest = (entry / "stat").read_text().rpartition(")")
                state, _, _, session = rest.split()[:4]
                mine = int(session) == self.process.pid and state != "Z"
                if mine and name in head.partition("(")[2]:
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        """Clean where it can be; Python's trackers go last, which remove the shared memory of killed ones."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        mine = [each.identity for each in every_process() if each.session == self.process.pid]
        assert kill(mine, timeout=10) == []
        self.process.wait()

    def recover(self, reason: str, *, by_row: bool = False, **_: object) -> Endpoint:
        self.losses.append(reason)
        self.end()
        self.endpoint = Endpoint(self._start(), "m", owned=True)
        return self.endpoint


@pytest.fixture
def real(vllm_python: Path, tiny_model: Path, tmp_path: Path) -> Iterator[RealLink]:
    link = RealLink(vllm_python, tiny_model, tmp_path / "vllm.log")
    yield link
    link.end()


def _said(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


# Rows that get an error each, with the server's status; None: it is not sent.
BAD: dict[int, tuple[int | None, dict[str, Any]]] = {
    5: (400, {"messages": _said("word " * 2000)}),
    6: (404, {"model": "nobody"}),
    7: (400, {"temperature": -1}),
    8: (400, {"temperature": "hot"}),
    9: (400, {"max_tokens": 0}),
    10: (400, {"stop": 5}),
    11: (None, {"messages": []}),
    12: (None, {"messages": _said("x", "alien")}),
    13: (None, {"stream": True}),
}
OUTCOMES = {"ok": ROWS - len(BAD), "rejected": 6, "invalid_input": 3}


def arguments(folder: Path) -> dict[str, Any]:
    rows = [batch_row(f"id-{i}", f"Say {i}.", model="m", max_tokens=16) for i in range(ROWS)]
    for number, (_, body) in BAD.items():
        rows[number] = batch_row(f"id-{number}", "x", **{"model": "m", "max_tokens": 16, **body})
    return {
        "input_path": str(write_rows(folder / "in.jsonl", rows)),
        "output_path": str(folder / "out.jsonl"),
        "concurrency": 32,
        "stall_timeout": 4,
        "probe_timeout": 5,
    }


def spec(folder: Path) -> BatchSpec:
    return BatchSpec(**arguments(folder))


def check(folder: Path) -> None:
    ids = [f"id-{index}" for index in range(ROWS)]
    good = [row["custom_id"] for row in read_rows(folder / "out.jsonl")]
    bad = read_rows(folder / "out.jsonl.errors.jsonl")
    assert good == [name for number, name in enumerate(ids) if number not in BAD]
    assert [(row["custom_id"], (row["response"] or {}).get("status_code")) for row in bad] == [
        (ids[number], status) for number, (status, _) in BAD.items()
    ]


def kill_api_server(link: RealLink) -> None:
    link.process.kill()


def kill_engine(link: RealLink) -> None:
    os.kill(link.processes("EngineCor")[0], signal.SIGKILL)


def kill_worker(link: RealLink) -> None:
    os.kill(link.processes("Worker")[0], signal.SIGKILL)


def freeze_engine(link: RealLink) -> None:
    os.kill(link.processes("EngineCor")[0], signal.SIGSTOP)


@pytest.mark.parametrize(
    "disturb",
    [
        kill_engine,
        pytest.param(kill_api_server, marks=pytest.mark.full),
        pytest.param(kill_worker, marks=pytest.mark.full),
        pytest.param(freeze_engine, marks=pytest.mark.full),
    ],
)
def test_nothing_is_lost(real: RealLink, tmp_path: Path, disturb: object) -> None:
    def later() -> None:
        until(lambda: journalled(tmp_path) >= 100, 60)
        assert callable(disturb)
        disturb(real)

    killer = threading.Thread(target=later)
    killer.start()
    result = run_batch(spec(tmp_path), real, journal_dir=str(tmp_path / "journal"), log=LOG)
    killer.join()
    assert len(real.losses) == 1, real.losses
    assert result.manifest.outcomes == OUTCOMES
    check(tmp_path)


@pytest.mark.full
def test_each_try_goes_on_where_the_one_before_was_ended(real: RealLink, tmp_path: Path) -> None:
    """By a full disk, by a kill; on another host's directory, while the network is cut."""
    given, url = arguments(tmp_path), real.endpoint.base_url
    journal = tmp_path / "journal"
    status, said, _ = finish(start_child(journal, url, given, limit_bytes=50_000))
    assert (status == 3 and "no space" in said.lower()) or "too large" in said.lower(), said
    full = journalled(tmp_path)
    process = start_child(journal, url, given)
    with killed_at(process):
        until(lambda: journalled(tmp_path) >= full + 50, 60)
    finish(process)
    killed = journalled(tmp_path)
    shutil.copytree(journal, tmp_path / "other" / "journal")
    with CuttingProxy(int(url.rpartition(":")[2])) as proxy:
        through = Endpoint(f"http://127.0.0.1:{proxy.port}", "m")
        link = ForeignEndpoint(through, report=LOG.info, patience=30)

        def later() -> None:
            until(lambda: journalled(tmp_path / "other") >= killed + 50, 60)
            proxy.cut(0.5)

        cut = threading.Thread(target=later)
        cut.start()
        where = str(tmp_path / "other" / "journal")
        manifest = run_batch(BatchSpec(**given), link, journal_dir=where, log=LOG).manifest
        cut.join()
    assert manifest.outcomes == OUTCOMES
    assert manifest.reused >= killed - 2 * len(BAD) - 2
    assert manifest.server_losses == 1
    check(tmp_path)


@pytest.mark.full
def test_counters_and_answers_of_a_quiet_run(real: RealLink, tmp_path: Path) -> None:
    before = look(real.endpoint)
    began = time.monotonic()
    result = run_batch(spec(tmp_path), real, journal_dir=str(tmp_path / "journal"), log=LOG)
    check(tmp_path)
    after = look(real.endpoint)
    assert before.moved is not None
    assert after.moved is not None
    assert after.moved > before.moved
    assert (after.running, after.waiting) == (0, 0)
    assert result.manifest.completion_tokens > ROWS
    assert time.monotonic() - began < 60
