"""What a batch's link does to the server beside giving its address."""

from __future__ import annotations

import time

from airflow_provider_vllm.server.links import SharedServer
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
