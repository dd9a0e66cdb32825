"""Asking a vLLM server how it is: an URL and a key go in, an Answer comes out.

A server is ours when it lists the expected model with our key **and** refuses the question without it: a
stranger on the port answers `/health` too, and one without a key takes any key.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_vllm import metrics

if TYPE_CHECKING:
    import aiohttp

SILENT, OURS, FOREIGN, ENGINE_DEAD, BUSY = "silent", "ours", "foreign", "engine dead", "busy"


@dataclass(frozen=True)
class Answer:
    """`verdict` is one of SILENT (nothing listens), OURS, FOREIGN, ENGINE_DEAD (health 503), BUSY (no answer
    in time); `detail` says what was seen."""

    verdict: str
    detail: str = ""


async def ask(
    session: aiohttp.ClientSession, base_url: str, key: str, model: str, timeout: float
) -> Answer:
    """One look at `/health` and `/v1/models`; takes at most about `timeout` seconds."""
    import aiohttp

    limit = aiohttp.ClientTimeout(total=timeout)
    try:
        async with session.get(f"{base_url}/health", timeout=limit) as response:
            if response.status == 503:
                return Answer(ENGINE_DEAD, "/health answered 503")
            if response.status != 200:
                return Answer(FOREIGN, f"/health answered {response.status}")
        headers = {"Authorization": f"Bearer {key}"}
        async with session.get(f"{base_url}/v1/models", headers=headers, timeout=limit) as response:
            with_key, body = response.status, await response.read()
        async with session.get(f"{base_url}/v1/models", timeout=limit) as response:
            without_key = response.status
    except asyncio.TimeoutError:
        return Answer(BUSY, f"no answer within {timeout:g} s")
    except aiohttp.ClientConnectorError:
        return Answer(SILENT, "nothing listens")
    except aiohttp.ClientError as exc:
        return Answer(BUSY, f"{type(exc).__name__}: {exc}")
    return judge(with_key, body, without_key, model)


def judge(with_key: int, body: bytes, without_key: int, model: str) -> Answer:
    """What the two answers of `/v1/models` say. Pure."""
    import orjson

    if with_key in (401, 403):
        return Answer(FOREIGN, "it refuses this server's key")
    if with_key != 200:
        return Answer(BUSY, f"/v1/models answered {with_key}")
    if without_key == 200:
        return Answer(FOREIGN, "it answers without a key")
    try:
        names = [str(entry["id"]) for entry in orjson.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return Answer(FOREIGN, "its list of models is none of vLLM's")
    if model not in names:
        return Answer(FOREIGN, f"it serves {', '.join(names) or 'nothing'}, not {model}")
    return Answer(OURS)


async def movement(session: aiohttp.ClientSession, base_url: str, timeout: float) -> float | None:
    """The sum of the counters that only move while vLLM works; None when they can't be read."""
    import aiohttp

    try:
        limit = aiohttp.ClientTimeout(total=timeout)
        async with session.get(f"{base_url}/metrics", timeout=limit) as response:
            if response.status != 200:
                return None
            return metrics.moved(metrics.read(await response.read()))
    except (aiohttp.ClientError, asyncio.TimeoutError):
        return None
