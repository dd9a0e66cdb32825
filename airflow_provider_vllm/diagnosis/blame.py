"""The events of one life in; the one to blame, and what only repeats it, out.

The order of blame: what a wrapper, a teardown or a refused request says never counts. Of the rest,
a failure that another process's death explains (a victim) comes after any other; then the deepest
process wins, then the earliest line. Of a chain of exceptions the first one that was raised stands
for it, unless only a later one says what a rule knows.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from airflow_provider_vllm.diagnosis import wrappers
from airflow_provider_vllm.diagnosis.events import Event
from airflow_provider_vllm.diagnosis.logs import SERVER, WORKER, Record
from airflow_provider_vllm.diagnosis.reader import Life
from airflow_provider_vllm.diagnosis.request import RULES as REQUEST_RULES
from airflow_provider_vllm.diagnosis.rule import Rule
from airflow_provider_vllm.diagnosis.stages import stage_of

NATIVE_DEPTH = WORKER + 1
STAGES_GO_ON = 2
NATIVE_GOES_ON = 40
"""So many ordinary lines after a native message show that it was harmless."""
STRONG, VICTIM, LOGGED, QUOTED = 3, 2, 1, 0
_ANY_PROCESS = "Automatically detected platform"
"""Each process says this first, that of the next start too: it is no progress of the one before."""
MESSAGE_CHARS = 6000
"""So much of a message is asked about."""
MIN_CUT = 30
"""So long is a message before a terminal cuts it, behind its prefix."""

SURE = 0.9
"""A rule of this confidence may speak for a chain from a later exception than the first."""

Known = tuple[Rule | None, re.Match[str] | None]

_SAYS_NOTHING = re.compile(r"validation errors? for \w+\s*$|^(?:\w+\.)*\w+:\s*$| raised:\s*$")
_INTERRUPT = re.compile(r"^KeyboardInterrupt\b")


@dataclass(frozen=True)
class Suspect:
    """An event that may be the cause, the rule that knows it, and how strongly it counts."""

    event: Event
    rule: Rule | None
    match: re.Match[str] | None
    strength: int

    def rank(self, first: int) -> tuple[int, int, int]:
        """The smallest of these is to blame; `first` is the line of the first plain exception.

        What native code printed before any exception explains it, and counts as deepest of all.
        """
        native = self.event.kind == "native" and self.event.number < first
        depth = NATIVE_DEPTH if native else self.event.depth
        return (-self.strength, -depth, self.event.number)


@dataclass(frozen=True)
class Blame:
    """`suspect` is None where only wrappers speak; `interrupt` is what ended it from outside."""

    suspect: Suspect | None
    wrappers: tuple[Event, ...]
    interrupt: Suspect | None
    messages: tuple[str, ...]


def blame(
    events: Sequence[Event], records: Sequence[Record], life: Life, rules: Sequence[Rule]
) -> Blame:
    """Chooses among the events of a life that came to a bad end."""
    history = _History(records, life)
    knowledge, refusals = _Knowledge(rules), _Knowledge(REQUEST_RULES)
    candidates = [event for event in events if not history.survived(event)]
    suspects: list[Suspect] = []
    repeated: list[Event] = []
    for chain in _chains(candidates):
        said = [event for event in chain if not _is_noise(event, life, refusals)]
        own = [event for event in said if not _is_wrapper(event)]
        repeated.extend(event for event in said if _is_wrapper(event))
        if own:
            suspects.append(_speaker(own, knowledge))
    suspects.extend(
        Suspect(event, *knowledge.known(event), QUOTED)
        for event in repeated
        if wrappers.QUOTE.search(event.message)
    )
    interrupts = [suspect for suspect in suspects if _interrupts(suspect)]
    others = [
        suspect
        for suspect in suspects
        if not _interrupts(suspect) and (suspect.event.kind != "native" or suspect.rule)
    ]
    others = [suspect for suspect in others if _counts(suspect, others)]
    strong = [s.event.number for s in others if s.event.kind != "native" and s.strength == STRONG]
    first = min(strong, default=life.last + 1)
    best = min(others, key=lambda suspect: suspect.rank(first), default=None)
    if best is not None and _follows_a_death(best, repeated):
        best = None
    return Blame(
        best,
        tuple(sorted(repeated, key=lambda event: event.number)),
        min(interrupts, key=lambda suspect: suspect.event.number, default=None),
        tuple(suspect.event.message for suspect in others),
    )


def _follows_a_death(suspect: Suspect, repeated: Sequence[Event]) -> bool:
    """Whether a process only lost contact with another one that had died before: it knows no more."""
    rule = suspect.rule
    if rule is None or not rule.victim or rule.group != "communication":
        return False
    return any(
        event.number < suspect.event.number and wrappers.DEATH.match(event.first_line)
        for event in repeated
    )


def _chains(events: Sequence[Event]) -> list[list[Event]]:
    """Exceptions of one chain together, each other event alone."""
    chains: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        key = ("chain", event.chain) if event.kind == "exception" else ("line", id(event))
        chains.setdefault(key, []).append(event)
    return list(chains.values())


def _speaker(chain: Sequence[Event], knowledge: _Knowledge) -> Suspect:
    """Who speaks for a chain: the exception that was raised first.

    Unless it says nothing by itself and a later one says what a rule is sure of. A rule that knows
    only a later one still names the cause.
    """
    known = [(event, *knowledge.known(event)) for event in chain]
    event, rule, match = known[0]
    sure = rule is not None and rule.confidence >= SURE
    for later, its_rule, its_match in known[1:]:
        if its_rule is None or sure:
            continue
        if its_rule.confidence >= SURE or ": " not in event.first_line:
            event, rule, match = later, its_rule, its_match
            break
        if rule is None:
            rule = its_rule
    stands = _at_match(event, match, rule is not None and rule.native)
    return Suspect(stands, rule, match, _strength(event, rule))


class _Knowledge:
    """The rules, with what they said of messages so far: a log may repeat one a thousand times."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.said: dict[tuple[bool, str, tuple[str, ...]], Known] = {}

    def known(self, event: Event) -> Known:
        """The first rule that knows this event, and how it matches."""
        found = self._first(event, event.message)
        if found[0] is None and event.kind != "native" and "\n" in event.message:
            found = self._first(event, _without_cuts(event.message))
        return found

    def _first(self, event: Event, message: str) -> Known:
        native = event.kind == "native"
        message = message[:MESSAGE_CHARS]
        key = (native, message, event.frames)
        if key not in self.said:
            rules = (rule for rule in self.rules if rule.native or not native)
            found = ((rule, rule.match(message, event.frames)) for rule in rules)
            self.said[key] = next((pair for pair in found if pair[1]), (None, None))
        return self.said[key]


def _without_cuts(message: str) -> str:
    """The message's long lines put together, in case that a terminal cut them."""
    lines = message.split("\n")
    whole = lines[0]
    for before, line in itertools.pairwise(lines):
        if len(before) < MIN_CUT:
            break
        whole += line
    return whole


def _at_match(event: Event, match: re.Match[str] | None, native: bool) -> Event:
    """The event, standing at that line of its message that says something.

    That is its first, unless the first only counts validation errors or names the exception's type,
    or unless what native code printed is quoted further down.
    """
    if not (native or _SAYS_NOTHING.search(event.first_line)):
        return event
    if match is None:
        return _at_line(event, 1)
    start = match.start() + len(match[0]) - len(match[0].lstrip())
    line = event.message.count("\n", 0, start)
    return _at_line(event, line or ("validation error" in event.first_line))


def _at_line(event: Event, line: int) -> Event:
    if not 0 < line < len(event.lines) or not re.search(r"\w", event.lines[line].text):
        return event
    return Event(**{**event.__dict__, "record": event.lines[line]})


def _counts(suspect: Suspect, others: Sequence[Suspect]) -> bool:
    """False for a native line that nothing supports, and a logged one that a traceback repeats."""
    rule, event = suspect.rule, suspect.event
    if rule is None:
        return True
    if event.kind == "logged":
        return not any(
            other.rule is rule
            and other.event.kind == "exception"
            and other.event.depth >= event.depth
            for other in others
        )
    rest = [other for other in others if other.event.kind != "native"]
    if event.kind != "native" or rule.needs is None or not rest:
        return True
    return any(re.search(rule.needs, other.event.message) for other in rest)


def _strength(event: Event, rule: Rule | None) -> int:
    if rule is not None:
        return VICTIM if rule.victim else STRONG
    if event.alone and event.record.level is None:
        return LOGGED
    return STRONG if event.kind == "exception" else LOGGED


def _interrupts(suspect: Suspect) -> bool:
    if suspect.rule is not None:
        return suspect.rule.interrupts
    return _INTERRUPT.match(suspect.event.message) is not None


def _is_wrapper(event: Event) -> bool:
    return wrappers.is_wrapper(event.message)


def _is_noise(event: Event, life: Life, refusals: _Knowledge) -> bool:
    first = event.first_line
    if any(wrappers.ENGINE_LOOP.search(frame) for frame in event.frames):
        return False  # the engine's own failure, raised again in each request
    if wrappers.TEARDOWN.search(first) or wrappers.TEARDOWN.search(event.header):
        return True
    if event.kind == "logged" and wrappers.HARMLESS.search(first):
        return True
    if (event.record.source or "").startswith("dump_input.py"):
        return True
    if life.serving is not None and event.number > life.serving:
        return wrappers.REQUEST.search(event.header or first) is not None or _refusal(
            event, refusals
        )
    return False


def _refusal(event: Event, refusals: _Knowledge) -> bool:
    """Whether the API server of a server at work only says why it refused a request."""
    if event.depth > SERVER or event.kind != "exception":
        return False
    return refusals.known(event)[0] is not None


class _History:
    """What went on after an event: a process that goes on loading or serving survived it."""

    def __init__(self, records: Sequence[Record], life: Life) -> None:
        self.life = life
        self.end = life.fatal or life.last
        self.stages: list[int] = []
        self.progress: dict[tuple[str | None, int | None], int] = {}
        self.quiet: list[int] = []
        self.moved = [s.number for s in life.stats if s.generation + s.prompt > 0]
        self.served = list(life.served)
        for record in records:
            if record.level in ("INFO", "DEBUG") and record.number <= self.end:
                self.quiet.append(record.number)
            if record.level not in ("INFO", "WARNING") or _ANY_PROCESS in record.text:
                continue
            if stage_of(record.text) is not None:
                self.progress[record.process, record.pid] = record.number
                self.stages.append(record.number)

    def survived(self, event: Event) -> bool:
        """Whether the life went on well after this event."""
        if self.life.ready is not None and event.number < self.life.ready:
            return True
        if self.life.serving is None:
            process = (event.record.process, event.record.pid)
            if event.kind == "native":
                return len(self.quiet) - bisect.bisect(self.quiet, event.number) > NATIVE_GOES_ON
            if event.depth <= SERVER and event.record.level is not None:
                later = len(self.stages) - bisect.bisect(self.stages, event.number)
                return later >= STAGES_GO_ON  # its children would not start without it
            return self.progress.get(process, 0) > event.number
        if self._between(self.moved, event.number) >= 2:
            return True
        return not self.life.stats and self._between(self.served, event.number) >= 20

    def _between(self, numbers: list[int], number: int) -> int:
        """How many of these lines stand after that one and before the end."""
        return bisect.bisect_left(numbers, self.end) - bisect.bisect(numbers, number)
