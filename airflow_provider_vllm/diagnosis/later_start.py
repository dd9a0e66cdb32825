"""A life that was ended in order in; a later start that died before vLLM's banner, out.

Such a start writes no line that begins a life: only the usage of a wrong command line, a shell's or
Python's word that there is no such program, or a traceback through the program's first frame. The
end of the life before may write a traceback too, but through its event loop or by an interrupt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from airflow_provider_vllm.diagnosis.events import Event
from airflow_provider_vllm.diagnosis.logs import Record
from airflow_provider_vllm.diagnosis.marks import marks_of
from airflow_provider_vllm.diagnosis.reader import Life

_PROGRAM = re.compile(r"^<frozen runpy>:|(?:^|/)vllm:<module>$")
_RAN = re.compile(
    r"asyncio/|uvloop|:run_server|:serve_http|multiprocessing/|:_?shutdown$|:_exitfunc$"
)
_INTERRUPT = re.compile(r"^(?:KeyboardInterrupt|SystemExit|GeneratorExit)\b")
_NEVER_RAN = re.compile(
    r"^usage: (?:vllm|api_server\.py|\S+\.py)\b"
    r"|: (?:vllm|python[\d.]*): (?:command )?not found$|exec: \"?(?:vllm|python[\d.]*)\"?: .*not found"
    r"|python[\d.]*: (?:No module named|Error while finding module|can't open file)"
)
_LAST_WORDS = re.compile(
    r"\[shutdown\]|Shutting down|Waiting for application shutdown|Application shutdown complete"
    r"|Finished server process|^- leaked |leaked (?:semaphore|shared_memory)|^nanobind: |skipped remainder"
)


def later_start(life: Life, kept: Sequence[Record], found: Sequence[Event]) -> Life | None:
    """The life of its own that this one's last lines are; None where they only end it."""
    orderly = life.orderly
    if orderly is None:
        return None
    never = (record.number for record in kept if _NEVER_RAN.search(record.text))
    died = (event.number for event in found if _died_early(event, found))
    sign = min((number for number in (*never, *died) if number > orderly), default=None)
    if sign is None:
        return None
    last = max(
        (
            record.number
            for record in kept
            if record.number < sign and _LAST_WORDS.search(record.text)
        ),
        default=orderly,
    )
    first = max(last, orderly) + 1
    later = Life(first=first)
    for number, line in life.lines():
        if number >= first:
            later.add(number, line, marks_of(line))
    return later


def _died_early(event: Event, found: Sequence[Event]) -> bool:
    """Whether a program ended by this exception before it served; of a chain the last one says it."""
    if event.kind != "exception" or not any(_PROGRAM.search(frame) for frame in event.frames):
        return False
    chain = [each for each in found if each.kind == "exception" and each.chain == event.chain]
    return not any(
        _INTERRUPT.match(each.message) or any(_RAN.search(frame) for frame in each.frames)
        for each in chain
    )
