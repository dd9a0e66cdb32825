"""A state root and a way to start the fake vLLM through the real supervisor."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.server.handle import ServerHandle
from airflow_provider_vllm.server.launch import LaunchOptions, launch
from airflow_provider_vllm.server.processes import this_process, tree_of
from airflow_provider_vllm.server.start import Running, start
from airflow_provider_vllm.server.state import GenerationDir, ServerState, StateRoot
from airflow_provider_vllm.server.stop import stop_server
from airflow_provider_vllm.spec import ServerSpec

FAKE = Path(__file__).parents[1] / "fakes" / "vllm.py"


def fake_spec(plan: dict[str, Any] | None = None, **fields: Any) -> ServerSpec:
    """A ServerSpec whose server is the fake, misbehaving as the plan says."""
    command = (
        sys.executable,
        str(FAKE),
        "--port",
        "{port}",
        "--model",
        "{model}",
        "--plan",
        json.dumps(plan or {}),
    )
    given: dict[str, Any] = {"start_attempts": 1, "startup_timeout": 30, "gpus": 0, **fields}
    return ServerSpec(model="tiny", command=command, preflight="off", **given)


def options_of(given: dict[str, Any]) -> LaunchOptions:
    """The servers of a test run that is killed end with it."""
    return LaunchOptions(**{"owner": this_process(), **given})


@dataclass
class Servers:
    """Starts fakes in one state root and ends all of them."""

    root: StateRoot
    reports: list[str] = field(default_factory=list)

    def start(self, spec: ServerSpec, server_id: str = "s", **options: Any) -> Running:
        return start(spec, server_id, self.root, options_of(options), report=self.reports.append)

    def launch(self, spec: ServerSpec, server_id: str = "s", **options: Any) -> ServerHandle:
        return launch(spec, server_id, self.root, options_of(options))

    def directory(self, server_id: str = "s") -> GenerationDir:
        found = self.root.newest(server_id)
        assert found is not None
        return found

    def state(self, server_id: str = "s") -> ServerState:
        found = self.directory(server_id).read()
        assert found is not None
        return found

    def tree(self, server_id: str = "s") -> list[int]:
        """Pids of everything that belongs to the newest start, guard included, supervisor not."""
        state = self.state(server_id)
        recorded = [p for p in (state.guard, state.engine, *state.tree) if p]
        session = state.engine.pid if state.engine else None
        return [s.pid for s in tree_of(recorded, session, [self.directory(server_id).log_file])]

    def end_all(self) -> None:
        for server_id in {d.server_dir.name for d in self.root.every_generation()}:
            stop_server(self.root, server_id, "end of test")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(StateRoot(tmp_path / "vllm"))
    yield found
    found.end_all()


def wait_for(what: Callable[[], Any], timeout: float = 15.0) -> float:
    """Wait until `what()` is true; the seconds it took. Fails after `timeout`."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > timeout:
            pytest.fail(f"not within {timeout:g} s: {what.__doc__ or what}")
        time.sleep(0.02)
    return time.monotonic() - began
