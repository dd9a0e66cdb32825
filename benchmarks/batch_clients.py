"""One client against one server in a fresh process: rows/s and CPU as JSON on stdout.

    python -m benchmarks.batch_clients KIND '{"url": ..., "rows": ..., "in_flight": ..., ...}'

Kinds: `provider` (run_batch with journal, order, retries, progress and results file), `bare` (a loop over
the same HTTP library that only posts and parses), `openai` (AsyncOpenAI, typed, a pool of workers, one line
written a row), `aiohttp` (the same pool over aiohttp and orjson).
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SENTENCE = "Number {}: write one sentence about it, in the plainest words that you know. "
PROMPTS = {"short": "Say something about {}.", "long": SENTENCE + "Then stop. " * 10}


@dataclass(frozen=True)
class Job:
    """What a client is asked to do."""

    url: str
    rows: int
    in_flight: int | str
    model: str = "m"
    max_tokens: int = 8
    pack: int | str = 1
    memory: bool = False
    endpoint: str = "chat"
    prompt: str = "long"
    folder: str | None = None  # where another one goes on


def bodies(job: Job) -> Iterator[dict[str, Any]]:
    prompt = PROMPTS[job.prompt]
    for number in range(job.rows):
        yield {
            "model": job.model,
            "messages": [{"role": "user", "content": prompt.format(number)}],
            "max_tokens": job.max_tokens,
        }


def write_input(job: Job, path: Path) -> None:
    """The rows as an OpenAI batch file."""
    import orjson

    with path.open("wb") as file:
        for number, body in enumerate(bodies(job)):
            row = {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(orjson.dumps(row) + b"\n")


def memory_mib() -> float:
    """What this process holds now, not its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def run_provider(job: Job, folder: Path) -> dict[str, Any]:
    """`seconds` is the sending, `whole` everything from the check of the input to the results file."""
    from airflow_provider_vllm.batch.endpoint import Endpoint
    from airflow_provider_vllm.batch.run import run_batch
    from airflow_provider_vllm.batch.spec import BatchSpec

    class Link:
        def planned(self) -> Endpoint:
            return Endpoint(job.url, job.model)

        def connect(self) -> Endpoint:
            return Endpoint(job.url, job.model)

        def renew(self) -> None:
            pass

        def recover(self, reason: str, *, by_row: bool = False, **_: object) -> Endpoint:
            raise AssertionError(reason)

    write_input(job, folder / "in.jsonl")
    spec = BatchSpec(
        input_path=str(folder / "in.jsonl"),
        output_path=str(folder / "out.jsonl"),
        concurrency=job.in_flight,  # type: ignore[arg-type]
        pack=job.pack,  # type: ignore[arg-type]
        progress_interval=0.25 if job.memory else 1.0,
    )
    seen: list[tuple[float, int, float]] = []
    began_with = memory_mib()

    def note(numbers: dict[str, Any]) -> None:
        seen.append((time.perf_counter(), numbers["done"], memory_mib()))

    began, cpu = time.perf_counter(), time.process_time()
    result = run_batch(
        spec,
        Link(),
        journal_dir=str(folder / "journal"),
        log=logging.getLogger("benchmark"),
        on_progress=note,
    )
    whole = time.perf_counter() - began
    manifest = result.manifest
    assert manifest.ok == job.rows, manifest.summary()
    found: dict[str, Any] = {
        "seconds": manifest.sending_seconds,
        "whole": whole,
        "cpu": time.process_time() - cpu,
        "concurrency": manifest.concurrency,
        "pack": manifest.pack,
    }
    if job.memory:
        found |= {"before_mib": began_with, "after_mib": memory_mib(), "seen": seen}
        found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def run_bare(job: Job, folder: Path) -> dict[str, Any]:
    """libcurl's multi interface with nothing around it."""
    import orjson
    import pycurl

    multi = pycurl.CurlMulti()
    multi.setopt(pycurl.M_MAXCONNECTS, int(job.in_flight) + 8)
    free = []
    for _ in range(int(job.in_flight)):
        curl = pycurl.Curl()
        curl.setopt(pycurl.URL, job.url + "/v1/chat/completions")
        curl.setopt(pycurl.HTTPHEADER, ["Content-Type: application/json", "Expect:"])
        curl.setopt(pycurl.NOSIGNAL, 1)
        curl.setopt(pycurl.POST, 1)
        curl.chunks = []
        curl.setopt(pycurl.WRITEFUNCTION, curl.chunks.append)
        free.append(curl)
    rows = bodies(job)
    began, cpu = time.perf_counter(), time.process_time()
    sent = done = 0
    while done < job.rows:
        while free and sent < job.rows:
            curl = free.pop()
            curl.setopt(pycurl.POSTFIELDS, orjson.dumps(next(rows)))
            multi.add_handle(curl)
            sent += 1
        multi.perform()
        _, good, bad = multi.info_read(1 << 20)
        assert not bad, bad
        for curl in good:
            multi.remove_handle(curl)
            assert orjson.loads(b"".join(curl.chunks))["choices"]
            curl.chunks.clear()
            free.append(curl)
        done += len(good)
        if not good:
            multi.select(1.0)
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}


def run_openai(job: Job, folder: Path) -> dict[str, Any]:
    from openai import AsyncOpenAI

    async def work() -> None:
        client = AsyncOpenAI(base_url=f"{job.url}/v1", api_key="none", timeout=600)
        rows = bodies(job)
        with (folder / "out.jsonl").open("w") as out:

            async def worker() -> None:
                for body in rows:
                    answer = await client.chat.completions.create(**body)
                    out.write(answer.model_dump_json() + "\n")

            await asyncio.gather(*(worker() for _ in range(int(job.in_flight))))
        await client.close()

    began, cpu = time.perf_counter(), time.process_time()
    asyncio.run(work())
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}


def run_aiohttp(job: Job, folder: Path) -> dict[str, Any]:
    import aiohttp
    import orjson

    async def work() -> None:
        rows = bodies(job)
        connector = aiohttp.TCPConnector(limit=int(job.in_flight))
        async with aiohttp.ClientSession(connector=connector) as session:
            with (folder / "out.jsonl").open("wb") as out:

                async def worker() -> None:
                    for body in rows:
                        async with session.post(
                            job.url + "/v1/chat/completions", data=orjson.dumps(body)
                        ) as reply:
                            raw = await reply.read()
                        assert orjson.loads(raw)["choices"]
                        out.write(raw + b"\n")

                await asyncio.gather(*(worker() for _ in range(int(job.in_flight))))

    began, cpu = time.perf_counter(), time.process_time()
    asyncio.run(work())
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}


KINDS = {
    "provider": run_provider,
    "bare": run_bare,
    "openai": run_openai,
    "aiohttp": run_aiohttp,
}


def main() -> None:
    kind, job = sys.argv[1], Job(**json.loads(sys.argv[2]))
    with tempfile.TemporaryDirectory() as name:
        found = KINDS[kind](job, Path(job.folder or name))
    print(json.dumps({"rows": job.rows, **found}))


if __name__ == "__main__":
    main()
