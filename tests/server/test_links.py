"""What a batch's link does to the server beside giving its address."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from airflow_provider_vllm.server.links import OwnServer, SharedServer, order_spec
from tests.server.conftest import Servers, fake_spec, options_of


def test_a_batch_that_connects_to_a_shared_server_renews_its_lease_at_once(
    servers: Servers,
) -> None:
    """It may be about to end, and the batch's own renewals begin with its first report."""
    running = servers.start(fake_spec(idle_timeout=60))
    running.control.renew(30)
    before = running.control.status()["lease_until"]
    time.sleep(1.1)
    link = SharedServer(running.handle, servers.root, options_of({}), report=servers.reports.append)
    assert not link.connected
    link.connect()
    assert link.connected
    assert running.control.status()["lease_until"] > before + 1


def test_what_made_a_server_start_is_kept_when_it_is_started_again(
    servers: Servers, tmp_path: Path
) -> None:
    line = (
        "ValueError: To serve at least one request with the model's max seq len (8192), (16.0 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (9.21 GiB). Based on the available memory, "
        "the estimated maximum model length is 4096."
    )
    plan = {
        "fail_at": "warm up",
        "fail_line": line,
        "fail_times": 1,
        "counter": str(tmp_path / "starts"),
    }
    spec = fake_spec(plan, start_attempts=2, engine_args={"max_model_len": 8192})
    link = OwnServer(
        spec, "s", servers.root, options_of({}), report=servers.reports.append, apply_remedy=True
    )
    try:
        link.connect()
        engine = servers.state().engine
        assert engine
        engine.signal(signal.SIGKILL)
        link.recover("killed by the test", by_row=False, probe=lambda _: None)
        again = order_spec(servers.directory())
        assert again
        assert again.engine_args["max_model_len"] == 4096
    finally:
        link.close()
