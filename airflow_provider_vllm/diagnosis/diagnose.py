"""A server's log, its exit status and evidence from its host in; a Diagnosis out. Pure.

Being silent is better than being wrong: a server that serves is healthy whatever its warnings say,
an ordinary shutdown is `stopped`, and where the cause stands in no line the Diagnosis says so
instead of blaming a line that only repeats it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from airflow_provider_vllm.diagnosis import silent
from airflow_provider_vllm.diagnosis.blame import STRONG, VICTIM, Blame, Suspect, blame
from airflow_provider_vllm.diagnosis.catalogue import NATIVE, RULES
from airflow_provider_vllm.diagnosis.events import Event, events
from airflow_provider_vllm.diagnosis.guess import guess_group
from airflow_provider_vllm.diagnosis.later_start import later_start
from airflow_provider_vllm.diagnosis.logs import Record, parsed, whole_lines
from airflow_provider_vllm.diagnosis.reader import Life, Readable, Transcript, read
from airflow_provider_vllm.diagnosis.rule import Diagnosis, Rule
from airflow_provider_vllm.diagnosis.template import filled

CONTEXT_LINES = 3
WRAPPER_LINES = 8


@dataclass(frozen=True)
class _Case:
    """One life with everything that is asked about it."""

    life: Life
    records: Sequence[Record]
    events: Sequence[Event]
    blame: Blame
    exit_status: int | None
    evidence: Mapping[str, Any]


def diagnose(
    lines: str | os.PathLike[str] | Readable | Iterable[str],
    *,
    exit_status: int | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Diagnoses one vLLM log: a path, a binary stream or lines.

    `exit_status` is the server's own (negative for a signal, or 128 + signal as shells say it),
    None where it still runs or nobody knows. `evidence` is what `evidence.collect` returned. Of
    several lives in one log the last is judged; the last but one where the last only began. Raises
    OSError where a path cannot be read, nothing else.
    """
    transcript = read(lines)
    found = _judge(transcript.last, exit_status, evidence or {})
    if found.cause in ("nothing_to_judge", "start_unfinished") and transcript.before is not None:
        before = _judge(transcript.before, None, evidence or {})
        if before.verdict == "failed":
            note = "The server was started again after this and that start had not ended yet."
            found = replace(before, notes=(*before.notes, note))
    return replace(found, notes=(*found.notes, *_other_lives(transcript)))


def _other_lives(transcript: Transcript) -> tuple[str, ...]:
    if transcript.lives == 1:
        return ()
    return (f"The log holds {transcript.lives} starts of the server; this is about the last.",)


def _judge(life: Life, exit_status: int | None, evidence: Mapping[str, Any]) -> Diagnosis:
    lines = life.lines()
    whole = whole_lines(lines)
    if len(whole) < len(lines):
        life = life.judged_anew((number, text) for number, (_, text) in whole)
    kept = parsed(whole)
    if exit_status is None:
        exit_status = _told(life, kept)
    found = events(kept, NATIVE)
    if (later := later_start(life, kept, found)) is not None:
        note = "Before that start the server had been stopped in order."
        judged = _judge(later, exit_status, evidence)
        return replace(judged, notes=(*judged.notes, note))
    case = _Case(life, kept, found, blame(found, kept, life, RULES), exit_status, evidence)
    if _stopped_in_order(case):
        return silent.stopped(life)
    if (interrupted := _interrupted(case)) is not None:
        return interrupted
    if not _came_to_a_bad_end(case):
        return silent.without_failure(life, kept, exit_status)
    suspect = case.blame.suspect
    if suspect is not None:
        return _named(case, suspect)
    return _context(case, silent.without_cause(life, kept, _wrappers(case), exit_status, evidence))


def _told(life: Life, kept: Sequence[Record]) -> int | None:
    """The exit status under the log; of a server at work only a signal: it may be its neighbour's."""
    told = None if life.orderly is not None else silent.told_exit_status(kept)
    return told if life.serving is None or _signal(told) is not None else None


def _signal(exit_status: int | None) -> int | None:
    if exit_status is None:
        return None
    if exit_status < 0:
        return -exit_status
    return exit_status - 128 if 128 < exit_status < 160 else None


def _stopped_in_order(case: _Case) -> bool:
    """Whether somebody asked for the end: everything fatal came after that."""
    life = case.life
    if life.orderly is None or (life.fatal is not None and life.fatal < life.orderly):
        return False
    if case.exit_status not in (None, 0) and _signal(case.exit_status) not in (2, 9, 15):
        return False
    suspect = case.blame.suspect
    if life.serving is not None or suspect is None:
        return True
    return suspect.strength != STRONG or suspect.event.number > life.orderly


def _interrupted(case: _Case) -> Diagnosis | None:
    interrupt, suspect = case.blame.interrupt, case.blame.suspect
    signal = _signal(case.exit_status)
    if interrupt is not None:
        if suspect is not None and suspect.strength == STRONG:
            follows = interrupt.rule is not None and interrupt.rule.victim
            if follows or suspect.event.number < interrupt.event.number:
                return None
        base = silent.interrupted(case.life, interrupt.rule)
        return _at(case, base, interrupt.event)
    if signal in (2, 15) and (suspect is None or suspect.strength != STRONG):
        return silent.interrupted(case.life, None, signal=signal)
    return None


def _came_to_a_bad_end(case: _Case) -> bool:
    life, suspect = case.life, case.blame.suspect
    if _ended_with_its_script(case):
        return False
    if life.fatal is not None:
        return True
    if case.exit_status not in (None, 0) or silent.was_killed(case.records):
        return True
    if suspect is None:
        return life.serving is None and bool(case.blame.wrappers)
    if life.serving is not None:
        return (
            suspect.event.kind == "native"
            and suspect.rule is not None
            and suspect.event.depth == 0
            and suspect.rule.group in ("dead_process", "kernel_hardware", "capacity")
        )
    return suspect.strength >= VICTIM or case.exit_status is not None or bool(case.blame.wrappers)


def _ended_with_its_script(case: _Case) -> bool:
    """A script that came to its end takes the engine with it, which one logged line then regrets."""
    said = case.blame
    only_logged = all(event.kind == "logged" for event in said.wrappers)
    ended_well = case.life.finished and case.exit_status in (None, 0)
    return ended_well and said.suspect is None and only_logged


def _named(case: _Case, suspect: Suspect) -> Diagnosis:
    rule, match, event = suspect.rule, suspect.match, suspect.event
    if rule is None:
        return _at(case, _unrecognised(case, suspect), event)
    values = {} if match is None else _values(case, rule, match, event.number)
    remedy = rule.remedy(match, case.blame.messages) if rule.remedy and match else None
    confidence = rule.confidence if suspect.strength == STRONG else min(rule.confidence, 0.7)
    diagnosis = Diagnosis(
        verdict="failed",
        group=rule.group,
        cause=rule.id,
        explanation=filled(rule.explanation, values),
        first_action=filled(rule.first_action, values),
        retry_launch=rule.launch,
        retry_request=rule.request,
        remedy=remedy,
        confidence=confidence,
    )
    return silent.with_evidence(_at(case, diagnosis, event), case.evidence)


def _unrecognised(case: _Case, suspect: Suspect) -> Diagnosis:
    event = suspect.event
    place = next((frame for frame in reversed(event.frames) if "vllm/" in frame), None)
    where = f", raised at {place.replace(':', ' in ')}" if place else ""
    kind = re.split(r"[:\s]", event.first_line, maxsplit=1)[0].rsplit(".", 1)[-1]
    strong = suspect.strength == STRONG
    serving = case.life.serving is not None and event.number > case.life.serving
    return Diagnosis(
        verdict="failed",
        group=guess_group(event, serving),
        cause="unrecognised",
        explanation=f"No rule knows this failure: {kind}{where}.",
        first_action="Read the root line; it is the first failure of the deepest process.",
        retry_launch=True,
        retry_request=None,
        confidence=0.6 if strong else 0.4,
    )


def _values(case: _Case, rule: Rule, match: re.Match[str], number: int) -> dict[str, str]:
    """What the sentences of `rule` are filled with; `number` is the line of its match."""
    values = {name: text for name, text in match.groupdict().items() if text}
    if rule.details is None:
        return values
    before = [record.text for record in case.records if record.number < number]
    after = [record.text for record in case.records if record.number > number]
    return {**values, **rule.details(match, before, after)}


def _at(case: _Case, diagnosis: Diagnosis, event: Event) -> Diagnosis:
    record = event.record
    return _context(
        case,
        replace(
            diagnosis,
            root_line=record.raw,
            root_line_number=record.number,
            process=event.process,
            wrapper_lines=_wrappers(case),
        ),
    )


def _wrappers(case: _Case) -> tuple[str, ...]:
    lines: dict[str, None] = {}
    for event in case.blame.wrappers:
        lines.setdefault(event.record.raw)
    return tuple(lines)[:WRAPPER_LINES]


def _context(case: _Case, diagnosis: Diagnosis) -> Diagnosis:
    number = diagnosis.root_line_number
    if number is None:
        return diagnosis
    kept = {record.number: record.raw for record in case.records}
    kept[number] = diagnosis.root_line or ""  # of several pieces with one number, this one
    numbers = sorted(kept)
    at = numbers.index(number)
    around = numbers[max(0, at - CONTEXT_LINES) : at + CONTEXT_LINES + 1]
    return replace(diagnosis, context=tuple((line, kept[line]) for line in around))
