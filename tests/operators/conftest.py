"""A worker for operators that no scheduler runs: its own state root, and nothing left in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_vllm.server.state import StateRoot
from airflow_provider_vllm.server.stop import stop_server
from tests import airflow_unit  # noqa: F401 - before Airflow is imported


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateRoot]:
    """The state root that the operators find in Airflow's configuration."""
    found = StateRoot(tmp_path / "vllm")
    monkeypatch.setenv("AIRFLOW__VLLM__STATE_ROOT", str(found.path))
    yield found
    for server_id in {directory.server_dir.name for directory in found.every_generation()}:
        stop_server(found, server_id, "end of test")


@pytest.fixture
def nothing_started(root: StateRoot) -> Iterator[StateRoot]:
    """Fails the test when something was started after all."""
    yield root
    assert root.every_generation() == []
