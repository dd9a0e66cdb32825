"""Where rows stand in, `file:line` out: for a message, without their text."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 8


def spans(places: Iterable[tuple[str, int]]) -> str:
    """`in.jsonl:5-20, in.jsonl:25 and 3 more` for files and lines in input order; lines in a row are one span."""
    found: list[tuple[str, int, int]] = []
    for source, line in places:
        if found and found[-1][0] == source and found[-1][2] == line - 1:
            found[-1] = (source, found[-1][1], line)
        else:
            found.append((source, line, line))
    shown = ", ".join(_text(*span) for span in found[:SHOWN])
    return shown + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def _text(source: str, first: int, last: int) -> str:
    return f"{source}:{first}" if first == last else f"{source}:{first}-{last}"
