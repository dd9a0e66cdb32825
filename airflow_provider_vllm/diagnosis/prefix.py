"""One raw log line in; what stands before its message, and the message, out.

Prefixes stack: a container runtime's stamp, the process, the rank, vLLM's own logger. Each is
optional, so a line without any is its own message. Nothing here looks at a second line, or knows
colours, which are gone before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What other programs put before a line: compose, journald, kubectl, build systems.
FOREIGN = re.compile(
    r"""(?:
        [\w./-]{1,60}\s{1,20}\|(?:\s|$)(?!\s*\d+%)   # "vllm-1  | ", but no progress bar
      | \s{0,4}\|\s(?=\[|\()
      | _bk;t=\d+\x07?   # Buildkite
      | \[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|\s?[+-]\d\d:?\d\d)?\]?(?:\s|$)
        (?:std(?:out|err)\s[FP]\s)?   # RFC 3339, containerd
      | (?:\d{4}\s)?[A-Z][a-z]{2}\s{1,2}\d{1,2}\s\d\d:\d\d:\d\d\s\S{1,80}\s
        [\w.@/-]{1,60}(?:\[\d+\])?:\s   # journald: "Apr  3 17:38:57 host unit[pid]: "
      | \[[A-Za-z]+-\d+\]\s   # "[Stage-0] "
      | \[(?:INFO|ERROR|WARNING|DEBUG|CRITICAL)\]\s   # Python's logging in a usual form
      | >\s(?=\S|\s\sFile\s)   # quoted in a mail or a page
      | \[\w+\.py:\d+\]\s   # the rest of a cut logger prefix
    )""",
    re.VERBOSE,
)
# "(EngineCore_DP0 pid=12)", "(RayWorkerWrapper pid=7, ip=10.0.0.2)", "[rank0]:"
PROCESS = re.compile(
    r"\((?P<name>[A-Za-z][\w:.<>-]*)(?P<more>(?: [\w=]+){0,4}?) ?(?:pid=|pid )(?P<pid>\d+)"
    r"(?:, ip=(?P<ip>[\w.:-]+))?[^)\n]{0,40}\)(?: |$)"
)
RANK = re.compile(r"\[rank(?P<rank>\d+)\]: ?")
# vLLM's logger, with the file in brackets since 0.7.3 and without before.
LOGGER = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL) "
    r"(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[?(?P<source>[\w./<>-]+:\d+)\](?: |$)"
)
# uvicorn's and Python's own logger.
PLAIN_LEVEL = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL): +")
# What only vLLM writes: anything before it on the line is another program's.
_ANCHOR = re.compile(
    r"\((?:API[Ss]erver|ApiServer|EngineCore|Worker|VllmWorker|RayWorker)[^()\n]{0,40}pid=\d+"
    r"|(?:INFO|WARNING|ERROR|CRITICAL|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d|\[rank\d+\]: "
)
ANCHOR_WITHIN = 200


@dataclass(frozen=True)
class Prefix:
    """Where a line came from. `process` is the deepest name in it, without its pid."""

    text: str
    process: str | None = None
    pid: int | None = None
    level: str | None = None
    source: str | None = None
    foreign: int = 0


def anchor_of(line: str) -> int | None:
    """Where vLLM's own text begins in this line, if that can be seen and is not inside a quote."""
    found = _ANCHOR.search(line, 0, ANCHOR_WITHIN)
    if found is None or any(quote in line[: found.start()] for quote in "\"'`"):
        return None
    return found.start()


def split_prefix(line: str) -> Prefix:
    """Takes the prefixes off one line (without its newline).

    `foreign` is the number of characters that other programs put before the line; `level` and
    `source` ("core.py:1510") are there only where vLLM's logger wrote the line. A line with two
    processes ("(EngineCore_0 pid=1) (VllmWorker TP0 pid=2)") belongs to the last one.
    """
    at = anchor_of(line)
    if at is None:
        at = _after_foreign(line, 0)
    foreign = at
    process: str | None = None
    pid: int | None = None
    while True:
        named = PROCESS.match(line, at)
        if named:
            more = (named["more"] or "").strip()
            process = f"{named['name']} {more}" if more else named["name"]
            pid = int(named["pid"])
            at = _after_foreign(line, named.end())
            continue
        ranked = RANK.match(line, at)
        if ranked:
            process = process or f"rank{ranked['rank']}"
            at = _after_foreign(line, ranked.end())
            continue
        break
    logged = LOGGER.match(line, at)
    if logged is None:
        return Prefix(line[at:], process, pid, None, None, foreign)
    at = logged.end()
    inner = PROCESS.match(line, at)
    if inner:
        process, pid, at = inner["name"], int(inner["pid"]), inner.end()
    return Prefix(line[at:], process, pid, logged["level"], logged["source"], foreign)


def _after_foreign(line: str, at: int) -> int:
    while (found := FOREIGN.match(line, at)) is not None and found.end() > at:
        at = found.end()
    return at
