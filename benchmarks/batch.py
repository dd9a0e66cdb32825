"""How fast a batch is, as ratios measured in one run.

    python -m benchmarks.batch                 all of them, one after the other
    python -m benchmarks.batch mock            against a fast local mock
    python -m benchmarks.batch million         memory and speed over a million rows
    python -m benchmarks.batch vllm            against a real server, see benchmarks/batch_vllm.py

Every measurement is a fresh process, the contenders take turns, and medians of the rounds are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.compiler import c_compiler

HERE = Path(__file__).parent
ANSWER = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion",
    "created": 1_700_000_000,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "A plain sentence about a number. " * 20},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 60, "completion_tokens": 8, "total_tokens": 68},
}
Results = dict[str, list[dict[str, Any]]]


@contextmanager
def mock(folder: Path, latency_ms: float = 0) -> Iterator[int]:
    """The mock server, compiled where it is not yet; gives its port."""
    for name in ("mock_server", "mock_load"):
        if not (folder / name).exists():
            command = [*c_compiler(), "-O2", "-o", str(folder / name), str(HERE / f"{name}.c")]
            subprocess.run(command, check=True)
    (folder / "answer.json").write_text(json.dumps(ANSWER))
    command = [str(folder / "mock_server"), str(folder / "answer.json"), str(latency_ms)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def ceiling(folder: Path, port: int, connections: int, requests: int = 100_000) -> float:
    """What the mock answers a C client, requests/s."""
    command = [folder / "mock_load", port, connections, requests, folder / "answer.json"]
    done = subprocess.run(
        [str(item) for item in command], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def measure(kind: str, **job: Any) -> dict[str, Any]:
    """One client in a fresh process; what it did goes to stderr at once, since a round of all takes minutes."""
    command = [sys.executable, "-m", "benchmarks.batch_clients", kind, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    what = f"{kind}, {found['rows']:,} rows, {job['in_flight']} in flight"
    print(
        f"    {what}: {found['rows'] / found['seconds']:,.0f} rows/s", file=sys.stderr, flush=True
    )
    return found


def median(results: list[dict[str, Any]], value: str = "rate") -> float:
    """The median of a value; `rate` is rows/s, `cpu` CPU seconds per 10,000 rows."""
    made = {
        "rate": lambda r: r["rows"] / r["seconds"],
        "whole rate": lambda r: r["rows"] / r.get("whole", r["seconds"]),
        "cpu": lambda r: r["cpu"] / r["rows"] * 10_000,
    }[value]
    return statistics.median(made(result) for result in results)


def say(results: Results, name: str) -> None:
    rates = [result["rows"] / result["seconds"] for result in results[name]]
    print(
        f"  {name:<15} {median(results[name]):>9,.0f} rows/s   whole {median(results[name], 'whole rate'):>9,.0f}"
        f"   CPU {median(results[name], 'cpu'):>6.2f} s / 10,000 rows   rounds {min(rates):,.0f} to {max(rates):,.0f}",
        flush=True,
    )


def verdict(text: str, value: float, target: float, *, at_most: bool = False) -> bool:
    good = value <= target if at_most else value >= target
    sign = "<=" if at_most else ">="
    print(
        f"  {'ok  ' if good else 'MISS'} {text}: {value:.2f} (target {sign} {target})", flush=True
    )
    return good


def against_mock(rounds: int, scale: float) -> bool:
    rows = {"provider": 60_000, "bare": 60_000, "aiohttp": 20_000, "openai": 3_000}
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for in_flight in (64, 256):
            with mock(folder) as port:
                top = ceiling(folder, port, in_flight)
                print(f"{in_flight} in flight, no latency; the mock's own ceiling {top:,.0f}/s")
                found: Results = defaultdict(list)
                for _ in range(rounds):
                    for kind, count in rows.items():
                        job = {"rows": int(count * scale), "in_flight": in_flight}
                        found[kind].append(measure(kind, url=f"http://127.0.0.1:{port}", **job))
            for kind in rows:
                say(found, kind)
            ours, bare, openai = (found[kind] for kind in ("provider", "bare", "openai"))
            good &= verdict("times AsyncOpenAI", median(ours) / median(openai), 10)
            good &= verdict("of the bare loop", median(ours) / median(bare), 0.7)
            cpu = median(ours, "cpu") / median(openai, "cpu")
            good &= verdict("CPU a row, of AsyncOpenAI's", cpu, 0.1, at_most=True)
        with mock(folder, 50) as port:
            found = defaultdict(list)
            for _ in range(rounds):
                job = {"rows": int(40_000 * scale), "in_flight": 256}
                found["provider"].append(measure("provider", url=f"http://127.0.0.1:{port}", **job))
        print("256 in flight, 50 ms of latency")
        say(found, "provider")
        good &= verdict("of in flight / latency", median(found["provider"]) / (256 / 0.05), 0.85)
    return good


def million(rows: int) -> bool:
    """Memory above that before the first row, of a retry too, and the speed at the end against the start."""
    with tempfile.TemporaryDirectory() as name, mock(Path(name)) as port:
        job = {"rows": rows, "in_flight": 64, "memory": True, "folder": name}
        found, retry = (
            measure("provider", url=f"http://127.0.0.1:{port}", **job) for _ in range(2)
        )
    print(
        f"{rows:,} rows in {found['seconds']:.0f} s, with the results file {found['whole']:.0f} s"
    )
    before, seen = found["before_mib"], found["seen"]
    late = [mib for _, done, mib in seen if done >= rows // 10]
    print(f"  before {before:.0f} MiB, from a tenth on {min(late):.0f} to {max(late):.0f} MiB")
    good = verdict("MiB above the start, at most", found["peak_mib"] - before, 80, at_most=True)
    good &= verdict("MiB grown after a tenth", max(late) - late[0], 8, at_most=True)
    held = retry["peak_mib"] - retry["before_mib"]
    good &= verdict("MiB above the start, of a retry that has all answers", held, 80, at_most=True)
    return good & verdict("speed of the last third, of the first", *_thirds(seen, rows), 0.9)


def _thirds(seen: list[list[float]], rows: int) -> tuple[float]:
    def rate(first: float, last: float) -> float:
        some = [(at, done) for at, done, _ in seen if first * rows <= done <= last * rows]
        return (some[-1][1] - some[0][1]) / (some[-1][0] - some[0][0])

    return (rate(0.66, 1.0) / rate(0.0, 0.34),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["mock", "million", "vllm"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--scale", type=float, default=1.0, help="of the rows against the mock")
    given, rest = parser.parse_known_args()
    good = True
    if given.what in (None, "mock"):
        good &= against_mock(given.rounds, given.scale)
    if given.what in (None, "million"):
        good &= million(given.rows)
    if given.what in (None, "vllm"):
        from benchmarks.batch_vllm import main as against_vllm

        good &= against_vllm(given.rounds, rest)
    sys.exit(not good)


if __name__ == "__main__":
    main()
