"""The network is cut in the middle of a batch, or swallows everything: for a while, or for good."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.run import run_batch
from airflow_provider_vllm.exceptions import BatchFailed
from airflow_provider_vllm.server.foreign import ForeignEndpoint
from tests.batch.helpers import LOG, ForeignLink, run, until
from tests.batch.matrix import ROWS, check, spec_of
from tests.fakes.endpoint import ThreadedEndpoint
from tests.fakes.proxy import CuttingProxy


def disturb(
    proxy: CuttingProxy, how: str, seconds: float, server: ThreadedEndpoint
) -> threading.Thread:
    """The network fails when 150 rows have come; the thread that does it, started."""

    def fail() -> None:
        until(lambda: server.behaviour.prompts.total() >= 150)
        getattr(proxy, how)(seconds)

    thread = threading.Thread(target=fail)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("how", "seconds", "losses"),
    [
        ("cut", 0.5, 1),
        pytest.param("cut", 3.0, 1, marks=pytest.mark.full),
        ("swallow", 0.5, 0),
        pytest.param("swallow", 8.0, 1, marks=pytest.mark.full),
    ],
)
def test_network_gone_for_a_while(
    server: ThreadedEndpoint,
    tmp_path: Path,
    quiet: dict[str, bytes],
    how: str,
    seconds: float,
    losses: int,
) -> None:
    """Connections are reset and refused, or stay and carry nothing; then all is as before."""
    server.behaviour.latency = 0.01
    with CuttingProxy(server.port) as proxy:
        link = ForeignLink(f"http://127.0.0.1:{proxy.port}")
        thread = disturb(proxy, how, seconds, server)
        run(spec_of(tmp_path, stall_timeout=1.5, probe_timeout=0.5), link, tmp_path)
        thread.join()
    assert len(link.losses) == losses
    check(tmp_path, quiet)


@pytest.mark.parametrize(
    ("how", "within"), [("cut", 20), pytest.param("swallow", 60, marks=pytest.mark.full)]
)
def test_network_gone_for_good(
    server: ThreadedEndpoint, tmp_path: Path, quiet: dict[str, bytes], how: str, within: float
) -> None:
    """The batch fails in bounded time and says where; a retry over another way sends the rest."""
    server.behaviour.latency = 0.01
    began = time.monotonic()
    with CuttingProxy(server.port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        link = ForeignEndpoint(Endpoint(url, "tiny"), report=LOG.info, patience=2)
        thread = disturb(proxy, how, 1e9, server)
        spec = spec_of(tmp_path, stall_timeout=1, probe_timeout=0.5)
        with pytest.raises(BatchFailed) as caught:
            run_batch(spec, link, journal_dir=str(tmp_path / "journal"), log=LOG)
    thread.join()
    assert time.monotonic() - began < within
    for part in (url, "did not come back within 2 s", "answers are kept in", "a retry sends only"):
        assert part in str(caught.value)
    before = server.behaviour.prompts.total()
    result = run(spec_of(tmp_path), ForeignLink(server.base_url), tmp_path)
    assert result.manifest.reused >= 100
    assert server.behaviour.prompts.total() - before == ROWS - 1 - result.manifest.reused
    check(tmp_path, quiet)
