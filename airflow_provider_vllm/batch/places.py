"""Row numbers in, `file:line` out: where rows stand, for a message, without their text.

No row remembers its place while it is sent; the input is read once more, so only when something went wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import pairwise

from airflow_provider_vllm.batch.source import UNREADABLE, Source
from airflow_provider_vllm.batch.sources import is_local, records
from airflow_provider_vllm.batch.spec import BatchSpec

SHOWN = 8


def places(spec: BatchSpec, sources: tuple[Source, ...], numbers: Iterable[int]) -> str:
    """`in.jsonl:5-20, in.jsonl:25 and 3 more` for the numbers of rows, from 0; lines in a row are one span.

    Files elsewhere are not fetched again: their rows are named by number.
    """
    wanted = sorted(set(numbers))
    found = [("row ", number + 1) for number in wanted]
    if all(is_local(source.path) for source in sources):
        with contextlib.suppress(*UNREADABLE):
            found = list(_find(spec, sources, wanted)) or found
    spans = [_text(name, first, last) for name, first, last in _spans(found)]
    more = f" and {len(spans) - SHOWN} more" if len(spans) > SHOWN else ""
    return ", ".join(spans[:SHOWN]) + more


def _find(
    spec: BatchSpec, sources: tuple[Source, ...], wanted: list[int]
) -> Iterator[tuple[str, int]]:
    last, wanted_set = wanted[-1] if wanted else -1, set(wanted)
    for number, (source, line, _) in enumerate(records(spec, sources)):
        if number in wanted_set:
            yield f"{source}:", line
        if number >= last:
            return


def _spans(found: list[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    if not found:
        return
    start = found[0]
    for one, next_one in pairwise([*found, ("", 0)]):
        if next_one != (one[0], one[1] + 1):
            yield start[0], start[1], one[1]
            start = next_one


def _text(name: str, first: int, last: int) -> str:
    return f"{name}{first}" if first == last else f"{name}{first}-{last}"
