"""A ready server's health, watched: what counts as frozen, and what does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from airflow_provider_vllm.server import life, state
from airflow_provider_vllm.server.lease import Lease
from airflow_provider_vllm.server.life import End, Life, Terms
from airflow_provider_vllm.server.order import Order
from airflow_provider_vllm.server.record import Record
from airflow_provider_vllm.server.state import ServerState, StateRoot
from tests.fakes.endpoint import BEHAVIOUR, Behaviour, build_app
from tests.server.conftest import fake_spec

FROZEN_S = 1.5


def watched(
    tmp_path: Path, do: Callable[[web.Application, web.AppRunner], Awaitable[None]]
) -> End | None:
    """Watch a server's health while something happens to it; the End of its life, if any."""

    async def run() -> End | None:
        app = build_app(Behaviour(api_key="key"))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        record = Record(
            StateRoot(tmp_path / "v").new_generation("s"), ServerState("s", 1, "0" * 16, "h", "n")
        )
        order = Order("s", 1, "0" * 16, fake_spec(), "python", None, None)
        terms = Terms(Lease.start(time.monotonic(), idle_timeout=9, max_lifetime=None), None)
        one = Life(order, "key", record, terms, 1, {})
        async with aiohttp.ClientSession() as session:
            watcher = asyncio.create_task(one._watch_health(session, url))
            await asyncio.sleep(0.2)
            await do(app, runner)
            watcher.cancel()
        await runner.cleanup()
        return one._ending.result() if one._ending.done() else None

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "FROZEN_S", FROZEN_S)
    monkeypatch.setattr(life, "HEALTH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(life, "HEALTH_S", 0.1)


def test_one_that_answers_lives(tmp_path: Path) -> None:
    async def nothing(app: web.Application, runner: web.AppRunner) -> None:
        await asyncio.sleep(FROZEN_S + 0.5)

    assert watched(tmp_path, nothing) is None


def test_one_that_stays_silent_has_frozen(tmp_path: Path) -> None:
    async def leave(app: web.Application, runner: web.AppRunner) -> None:
        await runner.cleanup()
        await asyncio.sleep(FROZEN_S + 1)

    end = watched(tmp_path, leave)
    assert end
    assert (end.state, end.reason) == (state.FAILED, "api_frozen")


def test_a_dead_engine_is_seen_at_once(tmp_path: Path) -> None:
    async def die(app: web.Application, runner: web.AppRunner) -> None:
        app[BEHAVIOUR].health = 503
        await asyncio.sleep(0.5)

    end = watched(tmp_path, die)
    assert end
    assert end.reason == "engine_dead"


def test_a_pause_of_the_whole_machine_is_no_silence(tmp_path: Path) -> None:
    """Both stand still for longer than a frozen server may, and one answer comes late after it."""

    async def pause(app: web.Application, runner: web.AppRunner) -> None:
        app[BEHAVIOUR].health = 404
        await asyncio.sleep(0.15)
        time.sleep(2 * FROZEN_S)
        await asyncio.sleep(0.15)
        app[BEHAVIOUR].health = 200
        await asyncio.sleep(0.5)

    assert watched(tmp_path, pause) is None
