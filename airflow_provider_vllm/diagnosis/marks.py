"""One line of a log in; what it says about the life of its server out.

A line is judged alone, and by its words: but for the status 200 and a full progress bar, its digits
make no difference. So lines that differ only in digits are looked at once (`MarkCache`), which is
what makes a log of millions of repeated errors quick to read.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from airflow_provider_vllm.diagnosis.envelope import messages
from airflow_provider_vllm.diagnosis.stages import is_fatal, stage_of

CACHED_LINES = 20_000
CACHED_CHARS = 1_000

_SERVER_START = re.compile(r"vLLM API server version \S|█  version \d")
_ENGINE_START = re.compile(r"\] Initializing an? (?:V\d )?LLM engine")
_READY = re.compile(r"Application startup complete|Uvicorn running on ")
_ORDERLY = re.compile(
    r"\[shutdown\] API server: (?:shutdown triggered|stopping engine client)"
    r"|\[shutdown\] EngineCore: (?:start mode|request processing complete|exiting busy loop)"
    r"|\] Shutting down FastAPI HTTP server|\[shutdown\] EngineCore: trigger received signal="
    r"|INFO:     Shutting down$|INFO:     Waiting for application shutdown"
)
_BORING = re.compile(
    r'INFO:?\s+[\w.:\[\]-]+ - "[A-Z]+ /|Route: /|\] Received request |leaked (?:instance|type|func)'
    r"|Adding(?:ing)? request|Added request|\d{1,3}%\|.{0,30}\| "
)
# Only a server that serves says these.
_AT_WORK = re.compile(
    r"ERROR: +Exception in ASGI application|Error in (?:\w*completion|preprocessing prompt"
    r"|applying chat|extracting tool|reasoning)|stream generator"
)
# A script without a server came to the end of its prompts.
_FINISHED = re.compile(r"Processed prompts: +100%")
_SERVED = re.compile(r'"POST /(?!.*load_lora)[^"]*" 200')
_ACCESS = re.compile(r'INFO:?\s+[\w.:\[\]-]+ - "[A-Z]+ /')
_DIGITS = b"0123456789"
_JSON_ENDS = ("}", ",")


class Marks(NamedTuple):
    """What one line says. `start` is "server" or "engine" where one starts there, or "process" where
    any Python process of vLLM does."""

    start: str | None = None
    stage: str | None = None
    boring: bool = False
    ready: bool = False
    fatal: bool = False
    at_work: bool = False
    trouble: bool = False
    orderly: bool = False
    served: bool = False
    accessed: bool = False
    finished: bool = False


def marks_of(line: str) -> Marks:
    """The marks of one line without its newline."""
    if line[-1:] in _JSON_ENDS and (inner := messages(line)) is not None:
        return _together([_marks(part) for part in inner[1]])
    return _marks(line)


def _marks(line: str) -> Marks:
    boring = _BORING.search(line) is not None
    return Marks(
        start=_start(line),
        stage=stage_of(line),
        boring=boring,
        ready=_READY.search(line) is not None,
        fatal=is_fatal(line),
        at_work=_AT_WORK.search(line) is not None,
        trouble="Traceback" in line or ": error: " in line,
        orderly=_ORDERLY.search(line) is not None,
        served=boring and _SERVED.search(line) is not None,
        accessed=boring and _ACCESS.search(line) is not None,
        finished=boring and _FINISHED.search(line) is not None,
    )


def _together(marks: list[Marks]) -> Marks:
    """The marks of a message of several lines; it is boring only where all of them are."""
    if len(marks) == 1:
        return marks[0]
    first = next((each.start for each in marks if each.start), None)
    stage = next((each.stage for each in marks if each.stage), None)
    boring = all(each.boring for each in marks)
    rest = [any(values) for values in list(zip(*marks, strict=True))[3:]]
    return Marks(first, stage, boring, *rest)


def _start(line: str) -> str | None:
    if "ersion" in line and _SERVER_START.search(line):
        return "server"
    if "Initializing a" in line and _ENGINE_START.search(line):
        return "engine"
    return "process" if "Automatically detected platform" in line else None


class MarkCache:
    """Marks of lines as bytes; remembers those of lines that differ in digits only."""

    def __init__(self) -> None:
        self.known: dict[bytes, Marks] = {}

    def of(self, raw: bytes, line: str) -> Marks:
        """The marks of `line`, which is `raw` as text."""
        if len(raw) > CACHED_CHARS:
            return marks_of(line)
        key = raw.translate(None, _DIGITS)
        if b'" 200' in raw or b" 100%" in raw:
            key += b"!"
        marks = self.known.get(key)
        if marks is None:
            marks = marks_of(line)
            if len(self.known) >= CACHED_LINES:
                self.known.clear()
            self.known[key] = marks
        return marks
