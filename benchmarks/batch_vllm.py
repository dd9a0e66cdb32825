"""The batch against a real vLLM server on this machine, client and server on the same cores.

    python -m benchmarks.batch vllm [--part speed|auto|run-batch] [--python PYTHON] [--model DIR] [--shared-session]

`speed`: the provider with and without packs against AsyncOpenAI, with short prompts and with those of the other parts,
of which the server's own work a row is twice as much. Two bounds beside it: a bare loop over the same HTTP library (of
rows sent alone), and vLLM's engine without server and client (of packs); `auto`: concurrency="auto" against fixed
numbers; `run-batch`: against `vllm run-batch` on the same prompts, for the rows and for the whole job, with all that a
task does: preflight, supervisor, readiness, teardown.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_provider_vllm.batch.run import run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.server.launch import LaunchOptions
from airflow_provider_vllm.server.links import OwnServer
from airflow_provider_vllm.server.processes import this_process
from airflow_provider_vllm.server.state import StateRoot
from airflow_provider_vllm.spec import ServerSpec
from benchmarks.batch import Results, measure, median, say, verdict
from benchmarks.batch_clients import PROMPTS, Job, write_input

ROOT = Path(__file__).parents[1]
FLAGS = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
NAME = "m"
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def environment(scratch: str) -> dict[str, str]:
    """What vLLM's CPU build needs; two variables of some build machines break it. In `scratch` it may leave files."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    return {**kept, "TMPDIR": scratch, **ENV}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@dataclass(frozen=True)
class Vllm:
    """Whose server it is.

    It has a session of its own, as the provider's servers have, or its client's. That matters where the kernel
    shares few CPUs out by session (autogroup): it then lets the server starve its client for seconds.
    """

    python: str
    model: str
    shared_session: bool


@contextmanager
def vllm_server(vllm: Vllm) -> Iterator[tuple[str, float]]:
    """A server that is ready: its URL and the seconds that the start took."""
    port = free_port()
    command = [vllm.python, "-m", "vllm.entrypoints.openai.api_server", "--model", vllm.model]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += [*FLAGS, "--disable-uvicorn-access-log"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=environment(scratch), stdout=log, stderr=log,
            start_new_session=not vllm.shared_session,
            process_group=0 if vllm.shared_session else None,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            while not answers(url):
                if process.poll() is not None or time.perf_counter() - began > 300:
                    log.seek(0)
                    raise SystemExit(f"vLLM did not start:\n{log.read()[-3000:].decode()}")
                time.sleep(0.1)
            yield url, time.perf_counter() - began
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=1):
            return True
    except OSError:
        return False


def engine_alone(vllm: Vllm, rounds: int, rows: int, prompt: str) -> dict[str, list[float]]:
    """rows/s of vLLM's engine with 64 sequences, fed without a server: each round's."""
    job = {"model": vllm.model, "rows": rows, "in_flight": 64, "prompt": PROMPTS[prompt]}
    script = str(Path(__file__).with_name("engine_alone.py"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rates.json"
        command = [vllm.python, script, json.dumps({**job, "rounds": rounds}), str(out)]
        done = subprocess.run(
            command,
            env=environment(scratch),
            capture_output=True,
            text=True,
            check=False,
            cwd=scratch,
        )
        if done.returncode:
            raise SystemExit(f"the engine failed ({done.returncode}):\n{done.stderr[-3000:]}")
        found: dict[str, list[float]] = json.loads(out.read_text())
    return found


def speed(vllm: Vllm, rounds: int, rows: int) -> bool:
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "packed": ("provider", {"pack": 16}),
        "64 packs": ("provider", {"pack": 16, "in_flight": 64 * 16}),
        "alone": ("provider", {"pack": 1}),
        "auto": ("provider", {"pack": "auto", "in_flight": "auto"}),
        "bare": ("bare", {}),
        "openai": ("openai", {}),
    }
    found: Results = defaultdict(list)
    with vllm_server(vllm) as (url, _):
        measure("provider", url=url, rows=200, in_flight=64, model=NAME)
        for _ in range(rounds):
            for prompt in PROMPTS:
                for name, (kind, more) in jobs.items():
                    job = {"url": url, "rows": rows, "in_flight": 64, "model": NAME, **more}
                    found[f"{name}, {prompt}"].append(measure(kind, prompt=prompt, **job))
    print(f"Real server, {rows:,} chat rows of 8 tokens, 64 in flight")
    for name in found:
        say(found, name)
    for prompt in PROMPTS:
        openai = median(found[f"openai, {prompt}"])
        for name in ("packed", "64 packs", "alone", "auto", "bare"):
            times = median(found[f"{name}, {prompt}"]) / openai
            print(f"       {name}, {prompt}, times AsyncOpenAI: {times:.2f}")
        for name, rates in engine_alone(vllm, rounds, rows, prompt).items():
            rate = statistics.median(rates)
            print(
                f"       the engine alone, from {name}, {prompt}: {rate:,.0f} rows/s,"
                f" times AsyncOpenAI: {rate / openai:.2f}"
            )
    openai = median(found["openai, short"])
    good = verdict("packed, times AsyncOpenAI", median(found["packed, short"]) / openai, 4)
    good &= verdict("alone, times AsyncOpenAI", median(found["alone, short"]) / openai, 2)
    cpu = median(found["alone, short"], "cpu") / median(found["openai, short"], "cpu")
    return good & verdict("CPU a row, of AsyncOpenAI's", cpu, 0.1, at_most=True)


def auto(vllm: Vllm, rounds: int, seconds: float) -> bool:
    """The best fixed setting is named by the other rounds: the best of the same round would be the luckiest."""
    fixed = (64, 128, 256, 512)
    rates: dict[int | str, list[float]] = defaultdict(list)
    ends: list[int] = []
    with vllm_server(vllm) as (url, _):
        base = {"url": url, "model": NAME, "pack": 1}
        guess = measure("provider", rows=2000, in_flight=128, **base)
        rate = 2000 / guess["seconds"]
        for _ in range(rounds):
            for limit in (64, 128, "auto", 256, 512):
                part = 1.0 if limit == "auto" else 0.5
                rows = int(rate * seconds * part)
                one = measure("provider", rows=rows, in_flight=limit, **base)
                rates[limit].append(one["rows"] / one["seconds"])
                if limit == "auto":
                    ends.append(one["concurrency"])
    for name, found in rates.items():
        each = ", ".join(f"{value:.0f}" for value in found)
        print(f"  {name:>5} in flight {statistics.median(found):>8,.0f} rows/s   rounds {each}")
    print(f"   auto ended at {', '.join(map(str, ends))}")
    ratios = []
    for number in range(rounds):
        others = {
            limit: rates[limit][:number] + rates[limit][number + 1 :] or rates[limit]
            for limit in fixed
        }
        best = max(fixed, key=lambda limit: statistics.median(others[limit]))
        ratios.append(rates["auto"][number] / rates[best][number])
    return verdict("auto, of the best fixed setting", statistics.median(ratios), 0.9)


def ids_of(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def run_batch_job(vllm: Vllm, source: Path, folder: Path) -> dict[str, float]:
    """vLLM's own batch command: whole seconds, and rows/s as its progress bar says at the end."""
    command = [vllm.python, "-m", "vllm.entrypoints.openai.run_batch"]
    command += ["-i", str(source), "-o", str(folder / "run-batch.jsonl"), "--model", vllm.model]
    command += ["--served-model-name", NAME, *FLAGS]
    began = time.perf_counter()
    done = subprocess.run(
        command,
        env=environment(str(folder)),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    whole = time.perf_counter() - began
    speeds = re.findall(r"([\d.]+)\s*(req/s|it/s|s/req|s/it)", done.stderr + done.stdout)
    if done.returncode or not speeds:
        raise SystemExit(f"run-batch failed ({done.returncode}):\n{done.stderr[-3000:]}")
    assert sorted(ids_of(folder / "run-batch.jsonl")) == sorted(ids_of(source))
    value, unit = speeds[-1]
    return {"whole": whole, "rate": float(value) if unit.endswith("/s") else 1 / float(value)}


def provider_job(vllm: Vllm, source: Path) -> dict[str, float]:
    """What a task does: preflight, guard and supervisor, readiness, the batch with its journal, the server's end."""
    spec = ServerSpec(
        model=vllm.model,
        python=vllm.python,
        served_model_name=NAME,
        gpus=0,
        engine_args={"enforce_eager": True, "dtype": "float32", "max_model_len": 1024},
        env=ENV,
        start_attempts=1,
    )
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "out.jsonl"
        began = time.perf_counter()
        options = LaunchOptions(owner=this_process())
        root = StateRoot(Path(name) / "state")
        link = OwnServer(spec, "benchmark", root, options, report=lambda _: None)
        batch = BatchSpec(input_path=str(source), output_path=str(output))
        log = logging.getLogger("benchmark")
        try:
            manifest = run_batch(batch, link, journal_dir=f"{name}/journal", log=log).manifest
        finally:
            link.close()
        whole = time.perf_counter() - began
        assert ids_of(output) == ids_of(source), manifest.summary()
    return {"whole": whole, "rate": manifest.rows_per_second}


def against_run_batch(vllm: Vllm, rounds: int, rows: int) -> bool:
    theirs: list[dict[str, float]] = []
    ours: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "in.jsonl"
        write_input(Job("", rows, 0, model=NAME), source)
        for _ in range(rounds):
            theirs.append(run_batch_job(vllm, source, Path(name)))
            ours.append(provider_job(vllm, source))
            print(
                f"  run-batch {json.dumps(theirs[-1])}  provider {json.dumps(ours[-1])}", flush=True
            )

    def ratio(value: str) -> float:
        """Of the two that ran one after the other: the machine changes more from round to round."""
        return statistics.median(
            our[value] / their[value] for our, their in zip(ours, theirs, strict=True)
        )

    good = verdict("rows/s, of run-batch's", ratio("rate"), 0.9)
    return good & verdict("whole job, of run-batch's seconds", ratio("whole"), 1.3, at_most=True)


def main(rounds: int, rest: list[str]) -> bool:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=["speed", "auto", "run-batch"])
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--model", default=str(ROOT / ".cache" / "models" / "tiny"))
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60, help="of steady state, for auto")
    parser.add_argument(
        "--shared-session", action="store_true", help="server and client in one session"
    )
    given = parser.parse_args(rest)
    vllm = Vllm(given.python, given.model, given.shared_session)
    good = True
    if given.part in (None, "speed"):
        good &= speed(vllm, rounds, given.prompts)
    if given.part in (None, "auto"):
        good &= auto(vllm, rounds, given.seconds)
    if given.part in (None, "run-batch"):
        good &= against_run_batch(vllm, rounds, given.prompts)
    return good
