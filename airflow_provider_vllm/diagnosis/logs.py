"""Kept lines in; records out: who wrote each line, at what level, and its message without prefixes.

Understands the shapes of every vLLM release up to 0.32, and what other programs do to them: stamps
in front, box drawings around, JSON around, lines cut at a terminal's width. A record's `raw` is
always the line as it stands in the log but for its colours (of a cut line, its first piece).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from airflow_provider_vllm.diagnosis.envelope import messages
from airflow_provider_vllm.diagnosis.foreign import learn_prefix
from airflow_provider_vllm.diagnosis.prefix import split_prefix
from airflow_provider_vllm.diagnosis.reader import Line
from airflow_provider_vllm.diagnosis.terminal import Cut, unwrapped

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
_REPEATED = re.compile(r"\[repeated \d+x across[^\]]*\]\s*$")
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
    return parsed(whole_lines(lines))


def parsed(lines: Iterable[Cut]) -> list[Record]:
    """Records of lines that are whole again."""
    parts = [
        (number, raw, level, text)
        for number, (raw, whole) in lines
        for level, text in _messages(whole)
    ]
    prefix = learn_prefix([text for *_, text in parts])
    return [_record(number, raw, level, text, prefix) for number, raw, level, text in parts]


def whole_lines(lines: Iterable[Line]) -> list[Cut]:
    """Each line's number, how it stands in the log, and what is left of it to read."""
    return unwrapped([(number, _inner(line)) for number, line in lines])


def _inner(line: str) -> tuple[str, str]:
    """The line as it stands, and what is left without frames drawn around it."""
    text = line
    if text[:1] in "│┃" or text[:2] in (" │", " ┃"):
        box = _BOX.match(text)
        text = box["body"] if box else text
    return line, text.rstrip()


def _messages(text: str) -> list[tuple[str | None, str]]:
    """Level and text of each message of a line, which is one unless it is wrapped in JSON."""
    inner = messages(text) if text.endswith(("}", ",")) else None
    return [(None, text)] if inner is None else [(inner[0], part) for part in inner[1]]


def _record(
    number: int, raw: str, level: str | None, text: str, prefix: re.Pattern[str] | None
) -> Record:
    if prefix is not None and (found := prefix.match(text)):
        text = text[found.end() :]
    parts = split_prefix(text)
    message = parts.text
    if "[repeated" in message:
        message = _REPEATED.sub("", message).rstrip()
    process = parts.process
    if process is None and parts.source is not None:
        process = _SOURCES.get(parts.source.rsplit("/")[-1].split(":")[0])
    return Record(number, raw, message, process, parts.pid, parts.level or level, parts.source)
