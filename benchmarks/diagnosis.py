"""How often the root line is found, beside two ways that people use.

    python -m benchmarks.diagnosis              the logs and shapes under tests/diagnosis
    python -m benchmarks.diagnosis large [GB]   time and memory on one large log (default 1 GB) of a
                                                busy server, and on one of repeated errors

A root line counts when it is exactly the labelled one (none where the cause stands in no line).
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from airflow_provider_vllm.diagnosis.diagnose import diagnose
from tests.diagnosis.shapes import cases

LOGS = Path(__file__).parents[1] / "tests" / "diagnosis" / "logs"
FINE = ("healthy", "stopped")
SURE = 0.8


@dataclass(frozen=True)
class Labelled:
    """A log with what a person says about it."""

    lines: Sequence[str]
    exit_status: int | None
    verdict: str
    root_line: str | None


@dataclass(frozen=True)
class Answer:
    """What a contender says: whether the server failed, which line, and how sure it is."""

    failed: bool
    root_line: str | None
    confidence: float


def ours(log: Labelled) -> Answer:
    """This package."""
    found = diagnose(log.lines, exit_status=log.exit_status)
    return Answer(found.verdict not in FINE, found.root_line, found.confidence)


def last_error_line(log: Labelled) -> Answer:
    """The last line with "Error" in it."""
    line = next((line for line in reversed(log.lines) if "Error" in line), None)
    return Answer(line is not None, line, 1.0)


def first_traceback(log: Labelled) -> Answer:
    """The last line of the first traceback: the first one after it that is not indented."""
    prefix = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ [\d: .-]+\[?[^\]]*\] ?)?")
    inside = False
    for line in log.lines:
        text = prefix.sub("", line)
        if "Traceback (most recent call last)" in line:
            inside = True
        elif inside and text and not text[0].isspace():
            return Answer(True, line, 1.0)
    return Answer(False, None, 1.0)


def shared_logs() -> list[Labelled]:
    """The whole logs of vLLM 0.32 on a CPU."""
    table = json.loads((LOGS / "expected.json").read_text())
    return [
        Labelled(
            gzip.decompress((LOGS / f"{name}.log.gz").read_bytes())
            .decode(errors="replace")
            .replace("\r", "\n")
            .split("\n"),
            label["exit_status"],
            label["verdict"],
            label["root_line"],
        )
        for name, label in table.items()
    ]


def shapes() -> list[Labelled]:
    """The excerpts of failures from all eras."""
    return [Labelled(case.lines, None, case.verdict, case.root_line) for case in cases()]


def score(name: str, answer: Callable[[Labelled], Answer], logs: Sequence[Labelled]) -> str:
    """One row of the table."""
    bad = [log for log in logs if log.verdict not in FINE]
    fine = [log for log in logs if log.verdict in FINE]
    answers = [answer(log) for log in bad]
    pairs = list(zip(bad, answers, strict=True))
    right = sum(one.root_line == log.root_line for log, one in pairs)
    sure = sum(one.root_line != log.root_line and one.confidence > SURE for log, one in pairs)
    blamed = sum(answer(log).failed for log in fine)
    return (
        f"{name:28} {right:>4} of {len(bad):<4} {right / len(bad):>5.0%}"
        f"   {sure:>4}   {blamed:>4} of {len(fine)}"
    )


def table() -> None:
    """Prints every contender on every set."""
    contenders = (("this package", ours), ("last line with Error", last_error_line))
    for title, logs in (("logs of vLLM 0.32", shared_logs()), ("shapes of all eras", shapes())):
        print(f"{title}\n{'':28} root line right   wrong and sure   healthy blamed")
        for name, answer in (*contenders, ("first traceback's last line", first_traceback)):
            print(score(name, answer, logs))


PREFIX = b"(APIServer pid=1) "
ACCESS = PREFIX + b'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n'
REFUSED = ACCESS.replace(b"200 OK", b"500 Internal Server Error")
STATS = (
    PREFIX
    + b"INFO 11-30 10:05:33 [loggers.py:335] Engine 000: Avg prompt throughput: 9.1 tokens/s, "
    b"Avg generation throughput: 41.7 tokens/s, Running: 9 reqs, Waiting: 0 reqs, "
    b"GPU KV cache usage: 3.0%, Prefix cache hit rate: 0.0%\n"
)
WARNING = PREFIX + b"WARNING 11-30 10:05:33 [a.py:1] something that does not matter\n"
ERROR = b"".join(
    PREFIX + b"ERROR 11-30 10:05:33 [serving_chat.py:257] " + line + b"\n"
    for line in (
        b"Error in preprocessing prompt inputs",
        b"Traceback (most recent call last):",
        b'  File "/srv/vllm/entrypoints/openai/serving_chat.py", line 236, in create_chat_completion',
        b"    ) = await self._preprocess_chat(",
        b"ValueError: This model's maximum context length is 8192 tokens.",
    )
)
LARGE = {
    "a busy server": (ACCESS * 500 + STATS) * 6 + WARNING,
    "repeated errors": (ERROR + REFUSED * 3 + WARNING) * 50 + STATS,
}


def write_large(file: IO[bytes], block: bytes, gigabytes: float) -> None:
    """A server that starts, writes `block` again and again, and loses its worker at the end."""
    log = gzip.decompress((LOGS / "32_sigkill_worker.log.gz").read_bytes())
    cut = log.index(b"\n", log.index(b"startup complete")) + 1
    file.write(log[:cut])
    for _ in range(int(gigabytes * 1e9 / len(block))):
        file.write(block)
    file.write(log[cut:])
    file.flush()


def large(gigabytes: float) -> None:
    """Diagnoses large logs of servers that die at their end."""
    for name, block in LARGE.items():
        with tempfile.NamedTemporaryFile(suffix=".log") as file:
            write_large(file, block, gigabytes)
            size = file.tell() / 1e9
            began = time.monotonic()
            found = diagnose(file.name)
            seconds = time.monotonic() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{name:16} {size:.2f} GB: {seconds:.1f} s, at most {peak:.0f} MiB resident, "
            f"{found.cause}"
        )


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("table", "large"), default="table")
    parser.add_argument("gigabytes", nargs="?", type=float, default=1.0)
    arguments = parser.parse_args()
    if arguments.what == "large":
        large(arguments.gigabytes)
    else:
        table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
