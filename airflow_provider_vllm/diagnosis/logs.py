"""Kept lines in; records out: who wrote each line, at what level, and its message without prefixes.

Understands the shapes of every vLLM release up to 0.32, and what other programs do to them: stamps
in front, box drawings around, JSON around, lines cut at a terminal's width. A record's `raw` is
always the line as it stands in the log (of a cut line, its first piece).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from airflow_provider_vllm.diagnosis.prefix import anchor_of, split_prefix
from airflow_provider_vllm.diagnosis.reader import Line

WORKER, ENGINE, SERVER, DRIVER = 3, 2, 1, 0
"""How deep a process is in vLLM's tree; the deepest one that failed is to blame."""

_DEPTHS = (
    (re.compile(r"Worker|VllmWorker|RayWorker|rank\d|ray::"), WORKER),
    (re.compile(r"Engine|DPCoordinator|ScalerCore"), ENGINE),
    (re.compile(r"A[Pp][Ii]Server|MainProcess|APIRouter|DPSupervisor"), SERVER),
)
# Files whose logger lines name their process where no prefix does (releases before 0.10.2).
_SOURCES = {
    "core.py": "EngineCore",
    "engine.py": "Engine",
    "async_llm.py": "APIServer",
    "core_client.py": "APIServer",
    "async_llm_engine.py": "APIServer",
    "client.py": "APIServer",
    "launcher.py": "APIServer",
    "api_server.py": "APIServer",
    "worker_base.py": "Worker",
    "worker.py": "Worker",
    "gpu_worker.py": "Worker",
    "gpu_model_runner.py": "Worker",
    "model_runner.py": "Worker",
    "multiproc_executor.py": "EngineCore",
}
_FRAME = re.compile(r'  File "[^"]+", line \d+|Traceback \(most recent call last\)')
_REPEATED = re.compile(r"\s*\x1b?(?:\[\d+m)?\[repeated \d+x across[^\]]*\](?:\x1b?\[0m)?\s*$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|(?<![\w\]])\[(?:0|1|3[0-7]|36|1;36|0;36)m")
_BOX = re.compile(r"^\s*[│┃|]\s(?P<body>.*?)\s*[│┃]?\s*$")


@dataclass(frozen=True)
class Record:
    """One line of the log. `process` is its name as logged or as its source file tells."""

    number: int
    raw: str
    text: str
    process: str | None = None
    pid: int | None = None
    level: str | None = None
    source: str | None = None

    @property
    def depth(self) -> int:
        """WORKER, ENGINE, SERVER or DRIVER (also where nothing names the process)."""
        return depth_of(self.process)

    @property
    def stream(self) -> tuple[str | None, int | None, str | None]:
        """Lines of one stream belong together: a logger call's lines, or one process's raw ones."""
        return (self.process, self.pid, self.source if self.level else None)


def depth_of(process: str | None) -> int:
    """How deep a process of this name is in the tree."""
    if process is None:
        return DRIVER
    return next((depth for pattern, depth in _DEPTHS if pattern.search(process)), DRIVER)


def records(lines: Iterable[Line]) -> list[Record]:
    """Records of the kept lines, in order; cut lines are put together again."""
    numbered = [(number, _inner(line)) for number, line in lines]
    prefix = _common_prefix(line for _, line in numbered)
    found: list[Record] = []
    for number, raw in _unwrapped(numbered):
        found.extend(_records_of(number, raw[0], raw[1], prefix))
    return found


def _inner(line: str) -> tuple[str, str]:
    """The line as it stands, and what is left without frames drawn around it and colours."""
    text = _COLOUR.sub("", line) if "[" in line else line
    if text[:1] in "│┃" or text[:2] in (" │", " ┃"):
        box = _BOX.match(text)
        text = box["body"] if box else text
    return line, text.rstrip()


def _records_of(number: int, raw: str, text: str, prefix: re.Pattern[str] | None) -> list[Record]:
    messages = _json_messages(text)
    if messages is not None:
        level, parts = messages
        made = [_record(number, raw, part, None) for part in parts]
        return [record if record.level else replace(record, level=level) for record in made]
    return [_record(number, raw, text, prefix)]


def _record(number: int, raw: str, text: str, prefix: re.Pattern[str] | None) -> Record:
    if prefix is not None and (found := prefix.match(text)):
        text = text[found.end() :]
    parts = split_prefix(text)
    message = _REPEATED.sub("", parts.text) if "[repeated" in parts.text else parts.text
    process = parts.process
    if process is None and parts.source is not None:
        process = _SOURCES.get(parts.source.rsplit("/")[-1].split(":")[0])
    return Record(number, raw, message, process, parts.pid, parts.level, parts.source)


def _json_messages(text: str) -> tuple[str | None, list[str]] | None:
    """Level and lines of a message that is wrapped in JSON (vLLM's own form, docker's json-file)."""
    start = text.find("{")
    if start < 0 or start > 120 or not text.endswith("}"):
        return None
    try:
        value = json.loads(text[start:])
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    message = next((value[key] for key in ("message", "msg", "log") if key in value), None)
    if not isinstance(message, str):
        return None
    level = value.get("level") or value.get("levelname")
    trace = value.get("exc_info")
    whole = message + ("\n" + trace if isinstance(trace, str) and trace != "None" else "")
    return (str(level).upper() if level else None), whole.rstrip("\n").split("\n")


def _common_prefix(texts: Iterable[tuple[str, str]]) -> re.Pattern[str] | None:
    """What some other program puts before most lines, learned from those that vLLM's logger wrote.

    Digits may differ from line to line. None where no such prefix stands out.
    """
    shapes: Counter[str] = Counter()
    anchored = 0
    for _, text in texts:
        anchor = anchor_of(text)
        if anchor is None:
            frame = _FRAME.search(text, 0, 200)
            anchor = frame.start() if frame else None
        if anchor is None:
            continue
        anchored += 1
        before = text[:anchor]
        if before.strip() and len(before) <= 120 and "it/s" not in before:
            shapes[re.sub(r"\d+", r"\\d+", re.escape(before))] += 1
    if not shapes:
        return None
    shape, count = shapes.most_common(1)[0]
    return (
        re.compile(shape.rstrip(" ").removesuffix("\\") + r"\ ?")
        if (count >= 5 and count * 2 >= anchored)
        else None
    )


def _unwrapped(lines: list[tuple[int, tuple[str, str]]]) -> list[tuple[int, tuple[str, str]]]:
    """Puts lines together that a terminal cut at its width; leaves other logs as they are."""
    width = _terminal_width([text for _, (_, text) in lines])
    if width is None:
        return lines
    joined: list[tuple[int, tuple[str, str]]] = []
    open_line = False
    for number, (raw, text) in lines:
        if open_line and text and not _begins_a_line(text):
            first, (first_raw, so_far) = joined[-1]
            joined[-1] = (first, (first_raw, so_far + text))
        else:
            joined.append((number, (raw, text)))
        open_line = len(text) >= width - 1
    return joined


def _terminal_width(texts: list[str]) -> int | None:
    long = [len(text) for text in texts if len(text) >= 60]
    if len(long) < 8:
        return None
    width = max(long)
    full = sum(1 for length in long if length >= width - 1)
    return width if width <= 320 and full >= 6 and full * 4 >= len(long) else None


def _begins_a_line(text: str) -> bool:
    parts = split_prefix(text)
    return (
        parts.level is not None
        or parts.process is not None
        or text.startswith(("Traceback (", '  File "', "INFO:", "ERROR:", "Process "))
    )
