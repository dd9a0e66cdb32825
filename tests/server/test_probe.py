"""Whose server answers, and how it is: judged purely, then asked of real listeners."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest
from aiohttp import web

from airflow_provider_vllm.server import probe
from airflow_provider_vllm.server.probe import (
    BUSY,
    ENGINE_DEAD,
    FOREIGN,
    OURS,
    SILENT,
    judge,
)
from tests.fakes.endpoint import BEHAVIOUR, Behaviour, build_app

MODELS = json.dumps({"object": "list", "data": [{"id": "tiny"}, {"id": "lora"}]}).encode()


@pytest.mark.parametrize(
    ("with_key", "body", "without_key", "verdict"),
    [
        (200, MODELS, 401, OURS),
        (200, MODELS, 403, OURS),
        (200, MODELS, 200, FOREIGN),
        (401, b"", 401, FOREIGN),
        (403, b"", 200, FOREIGN),
        (404, b"", 404, BUSY),
        (500, b"", 401, BUSY),
        (503, b"", 503, BUSY),
        (200, json.dumps({"data": [{"id": "other"}]}).encode(), 401, FOREIGN),
        (200, json.dumps({"data": []}).encode(), 401, FOREIGN),
        (200, b"<html>", 401, FOREIGN),
        (200, b"[]", 401, FOREIGN),
        (200, b'{"data": {"id": "tiny"}}', 401, FOREIGN),
        (200, b'{"data": [1]}', 401, FOREIGN),
        (200, b"null", 401, FOREIGN),
        (200, b"\xff", 401, FOREIGN),
    ],
)
def test_judge(with_key: int, body: bytes, without_key: int, verdict: str) -> None:
    assert judge(with_key, body, without_key, "tiny").verdict == verdict


def asked(behaviour: Behaviour | None, *, hang: bool = False) -> probe.Answer:
    """Ask a server that behaves so; None: nothing listens; `hang`: it accepts and never answers."""

    async def run() -> probe.Answer:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            if hang:
                listener.listen()
            runner = web.AppRunner(build_app(behaviour))
            await runner.setup()
            if behaviour:
                listener.listen()
                await web.SockSite(runner, listener).start()
            async with aiohttp.ClientSession() as session:
                answer = await probe.ask(session, url, "key", "tiny", 0.5)
            await runner.cleanup()
            return answer

    return asyncio.run(run())


def test_asking() -> None:
    assert asked(Behaviour(api_key="key")).verdict == OURS
    assert asked(Behaviour(api_key="key", health=503)).verdict == ENGINE_DEAD
    assert asked(Behaviour(api_key="key", health=404)).verdict == FOREIGN
    assert asked(Behaviour(api_key="other")).verdict == FOREIGN
    assert asked(Behaviour(api_key=None)).verdict == FOREIGN
    assert asked(Behaviour(api_key="key", models=("x",))).verdict == FOREIGN
    assert asked(None).verdict == SILENT
    assert asked(None, hang=True).verdict == BUSY


def test_movement_is_the_sum_of_the_counters_of_work() -> None:
    async def run() -> list[float | None]:
        app = build_app(Behaviour(api_key="key"))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            idle = await probe.movement(session, url, 1)
            app[BEHAVIOUR].running = 5
            still = await probe.movement(session, url, 1)
            app[BEHAVIOUR].tokens += 3
            moved = await probe.movement(session, url, 1)
            await runner.cleanup()
            gone = await probe.movement(session, url, 1)
        return [idle, still, moved, gone]

    idle, still, moved, gone = asyncio.run(run())
    assert idle is not None
    assert still == idle
    assert moved is not None
    assert moved > idle
    assert gone is None
