"""Records in; events out: exceptions with their frames, logged errors, and native messages.

Tracebacks are put together per stream, so that processes that write at once do not mix. Of a chain
of exceptions each is an event of its own, with its place in the chain. Nothing is judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from airflow_provider_vllm.diagnosis.logs import Record, depth_of
from airflow_provider_vllm.diagnosis.wrappers import is_wrapper

MESSAGE_LINES = 14
FIRST_CHARS = 2000
STRANGE_LINES = 40
FAR = 300
"""Lines of one logger call are never so many lines of other processes apart."""

_TRACEBACK = re.compile(r"Traceback \(most recent call last\):?[\s─╮]*$")
_CHAINED = re.compile(
    r"The above exception was the direct cause of|During handling of the above exception"
)
_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line \d+(?:, in (?P<name>.+))?')
# The line that ends a traceback: a dotted name that is an exception's by its end, or by its colon.
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?:_?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Died|Failed"
    r"|NotFound|Group|Warning|Unsupported|Iteration)\b|_?[A-Z]\w*(?=: )|gaierror\b|timeout\b)"
    r"|^(?:[a-z_]\w*\.)+_?[A-Z]\w*$"
)
# An exception that stands alone, as in a log of which only the end was kept.
_BARE = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Failed)|gaierror)(?:: |:?$)"
    r"|^KeyboardInterrupt$"
)
_MARKERS = re.compile(r"^[\s^~]+$")
_GROUP = re.compile(r"^\s*[|+][-+ |]*")
_OWNER = re.compile(r"^Process ([A-Za-z]\w*(?:-\d+)?):$")
_PLACES = (
    (re.compile(r"multiproc_executor\.py:(?:worker_main|make_worker|worker_busy_loop)"), "Worker"),
    (re.compile(r"engine/core\.py:run_engine_core|run_busy_loop"), "EngineCore"),
    (re.compile(r"engine\.py:run_mp_engine"), "Engine"),
    (re.compile(r"entrypoints/openai|api_server|run_server|entrypoints/cli"), "APIServer"),
)
# Messages whose next line says what is wrong, even after an empty one.
_GOES_ON = re.compile(r"validation errors? for \w+\s*$|:\s*$")
# A raw message ends where one of these begins.
_BREAK = re.compile(
    r"^(?:Process \w+(?:-\d+)?:$|INFO:|ERROR:|WARNING:|nanobind:|\[rank\d+\]|\[[WEIF]\d{3,4} |usage: "
    r"|Loading \w+ checkpoint|\d+%\|)|resource_tracker"
)

_BAD_LEVELS = frozenset(("ERROR", "CRITICAL", "FATAL"))


@dataclass
class Event:
    """Something that failed, as the log tells it.

    `kind`: "exception", "logged" (a logger's error without traceback) or "native" (printed by code
    that is not Python). `message` is its text with the lines that go on with it, `frames` are
    "path:function" from the outermost to the innermost, `header` is what was logged before the
    traceback, `link` its place in a chain of exceptions: 0 for the first one that was raised. An exception
    that is `alone` stands without any traceback.
    """

    kind: str
    record: Record
    message: str
    process: str | None
    frames: tuple[str, ...] = ()
    header: str = ""
    link: int = 0
    chain: int = 0
    alone: bool = False
    lines: list[Record] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The line in the file where it stands."""
        return self.record.number

    @property
    def depth(self) -> int:
        """How deep its process is in vLLM's tree."""
        return depth_of(self.process)

    @property
    def first_line(self) -> str:
        """The first line of the message, as much of it as matters."""
        return self.message.split("\n", 1)[0][:FIRST_CHARS]


class _Stream:
    """The traceback that one stream is in the middle of."""

    def __init__(self) -> None:
        self.state = "idle"
        self.header: Record | None = None
        self.previous: Record | None = None
        self.owner: str | None = None
        self.frames: list[str] = []
        self.strange = 0
        self.indent = 0
        self.headless = False
        self.event: Event | None = None
        self.logged: Event | None = None
        self.complete = False
        self.link = 0
        self.chain = 0


class _Parser:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.streams: dict[tuple[str | None, int | None, str | None], _Stream] = {}
        self.chains = 0

    def add(self, record: Record) -> None:
        stream = self.streams.setdefault(record.stream, _Stream())
        text = record.text
        if ("|" in text[:8] or "+" in text[:8]) and _GROUP.match(text):
            text = _GROUP.sub("", text)
        if text.startswith("**"):  # made bold in a page
            text = text.strip("*")
        opened = _TRACEBACK.search(text)
        if opened:
            self._open(stream, record, text, opened)
        elif stream.state == "frames":
            self._frame(stream, record, text)
        elif stream.state == "message":
            self._message(stream, record, text)
        else:
            self._idle(stream, record, text)

    def _open(
        self, stream: _Stream, record: Record, text: str, opened: re.Match[str] | None
    ) -> None:
        if stream.state != "chained":
            self.chains += 1
            stream.chain, stream.link = self.chains, 0
            before = text[: opened.start()].strip() if opened else ""
            if before:
                stream.header = replace(record, text=before)
            elif stream.state == "message":
                stream.header = self._announced(stream)
            stream.event = None
        stream.state, stream.frames, stream.strange = "frames", [], 0
        stream.indent = len(text) - len(text.lstrip()) if opened else 0
        stream.headless = opened is None

    def _announced(self, stream: _Stream) -> Record | None:
        """The line before a traceback that follows another one: no part of that one's message."""
        event, header = stream.event, stream.previous
        if event is None or header is None:
            return None
        if len(event.lines) > 1 and event.lines[-1] is header:
            event.lines.pop()
            event.message = event.message.rsplit("\n", 1)[0]
        return header

    def _frame(self, stream: _Stream, record: Record, text: str) -> None:
        if stream.indent and not text[: stream.indent].strip():
            text = text[stream.indent :]
        found = _FRAME.match(text)
        if found:
            path = _inside(found["path"])
            stream.frames.append(f"{path}:{(found['name'] or '').strip()}")
            stream.strange = 0
            return
        if not text or text[0].isspace() or text.startswith("[Previous line"):
            return
        if _EXCEPTION.match(text):
            self._exception(stream, record, text)
            return
        stream.strange += 1  # a source line without its indent, or another program's line
        if stream.strange > STRANGE_LINES or (stream.headless and not _MARKERS.match(text)):
            self._close(stream)
            self._idle(stream, record, text)

    def _exception(self, stream: _Stream, record: Record, text: str) -> None:
        header = stream.header.text if stream.header else ""
        event = Event(
            "exception",
            record,
            text,
            record.process or _placed(stream.frames) or stream.owner,
            tuple(stream.frames),
            header,
            stream.link,
            stream.chain,
            lines=[record],
        )
        self.events.append(event)
        stream.event, stream.state, stream.complete = event, "message", False
        stream.previous = None
        stream.link += 1

    def _message(self, stream: _Stream, record: Record, text: str) -> None:
        event = stream.event
        if event is None:
            stream.state = "idle"
            return
        if _CHAINED.search(text):
            stream.state = "chained"
            return
        if _FRAME.match(text):  # Ray prints the remote traceback after the local exception's name
            stream.state, stream.frames = "frames", []
            self._frame(stream, record, text)
            return
        gap = record.number - event.lines[-1].number
        if gap > FAR or (record.level is None and (_BREAK.search(text) or gap > 60)):
            self._close(stream)
            self._idle(stream, record, text)
            return
        if event.alone and _BARE.match(text):
            self._bare(stream, record, text)
            return
        if is_wrapper(event.message) and _BARE.match(text):
            self._exception(stream, record, text)
            return
        stream.previous = record
        if record.level is None and not text.strip():
            stream.complete = stream.complete or not _GOES_ON.search(event.message)
        if len(event.lines) < MESSAGE_LINES and not stream.complete:
            event.lines.append(record)
            event.message += "\n" + text

    def _idle(self, stream: _Stream, record: Record, text: str) -> None:
        if stream.state == "chained" and not text.strip():
            return
        if _CHAINED.search(text):
            stream.state = "chained"
            return
        self._close(stream)
        owner = _OWNER.match(text)
        if owner:
            stream.owner = owner[1]
        if _FRAME.match(text):  # the beginning of the traceback is not in the log
            self._open(stream, record, text, None)
            self._frame(stream, record, text)
            return
        if text.strip():
            stream.header = record
        if _BARE.match(text) and (record.level is None or record.level in _BAD_LEVELS):
            self._bare(stream, record, text)
        elif record.level in _BAD_LEVELS or text.startswith(("ERROR:", "CRITICAL:")):
            self._logged(stream, record, text)

    def _bare(self, stream: _Stream, record: Record, text: str) -> None:
        self.chains += 1
        stream.chain, stream.link, stream.frames = self.chains, 0, []
        stream.header = None
        self._exception(stream, record, text)
        if stream.event is not None:
            stream.event.alone = True

    def _logged(self, stream: _Stream, record: Record, text: str) -> None:
        last = stream.logged
        if last is not None and record.level and record.number - last.lines[-1].number <= 3:
            if len(last.lines) < MESSAGE_LINES:
                last.lines.append(record)
                last.message += "\n" + text
            return
        stream.logged = Event("logged", record, text, record.process, lines=[record])
        self.events.append(stream.logged)

    def _close(self, stream: _Stream) -> None:
        if stream.state != "idle":
            stream.owner = stream.header = stream.logged = None
        stream.state, stream.event = "idle", None


def _inside(path: str) -> str:
    """The path of a source file from its package on; of others the last three parts."""
    parts = re.split(r"[/\\]", path)
    for folder, skipped in (("site-packages", 1), ("dist-packages", 1), ("vllm", 0)):
        if folder in parts:
            at = len(parts) - 1 - parts[::-1].index(folder)
            return "/".join(parts[at + skipped :])
    return "/".join(parts[-3:])


def _may_be_native(record: Record) -> bool:
    if record.level not in (None, "WARNING", "ERROR", "CRITICAL"):
        return False
    return "Warning:" not in record.text and not record.text.startswith(("INFO:", "  "))


def _placed(frames: list[str]) -> str | None:
    """The process that a traceback without a name must come from, by its frames."""
    for frame in frames:
        for pattern, process in _PLACES:
            if pattern.search(frame):
                return process
    return None


def events(lines: Iterable[Record], native: re.Pattern[str]) -> list[Event]:
    """Every event in the order of the file. `native` finds messages that no logger wrote."""
    parser = _Parser()
    for record in lines:
        before = len(parser.events)
        parser.add(record)
        if (
            len(parser.events) == before
            and _may_be_native(record)
            and native.search(record.text, 0, 600)
        ):
            parser.events.append(
                Event("native", record, record.text, record.process, lines=[record])
            )
    found = _without_headers(parser.events)
    return sorted(found, key=lambda event: event.number)


def _without_headers(found: list[Event]) -> list[Event]:
    """Drops logged lines that only announce the traceback after them."""
    announced = {
        (event.record.stream, event.header) for event in found if event.kind == "exception"
    }
    return [
        event
        for event in found
        if event.kind != "logged" or (event.record.stream, event.lines[-1].text) not in announced
    ]
