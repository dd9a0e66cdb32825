"""The lines of a log in; what some other program put before them, as a pattern, out.

Only that program knows its form, so it is learned from the lines themselves: from those that vLLM's
own logger wrote, or, where there are few of these, from what all lines have in common.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from airflow_provider_vllm.diagnosis.prefix import anchor_of

PREFIX_CHARS = 120
SAMPLE = 400
SHARE = 0.9
"""So many of all lines begin alike where another program wrote their beginning."""

_FRAME = re.compile(r'  File "[^"]+", line \d+|Traceback \(most recent call last\)')
_NUMBER = re.compile(r"\d+")
# Where vLLM's own text begins in a line whose numbers are written 0.
_OWN = re.compile(
    r"\(\w[^()\n]{0,40}pid=0|(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)(?: 0-0 |:  )|\[rank0\]|[{\"']"
)
_BOUNDARY = re.compile(r".*(?:[\]:|>)-] |\t)")


def learn_prefix(texts: Sequence[str]) -> re.Pattern[str] | None:
    """The pattern of the foreign prefix; None where no such prefix stands out."""
    common = _common_beginning([text for text in texts if text.strip()])
    if common is None:
        anchored = _before_anchors(texts)
        return re.compile(_pattern(anchored)) if anchored else None
    outer = re.compile(_pattern(common))
    inner = _before_anchors([outer.sub("", text, count=1) for text in texts])
    return re.compile(f"{outer.pattern}(?:{_pattern(inner)})?") if inner else outer


def _pattern(shape: str) -> str:
    return re.escape(shape).replace("0", r"\d+").removesuffix("\\ ") + r"\ ?"


def _common_beginning(texts: Sequence[str]) -> str | None:
    """What nearly all lines begin with, numbers written 0.

    Lines that begin alike are neighbours once sorted, and the first and last of them tell how far.
    Only spaces must be before every line: most lines of a traceback are indented anyway.
    """
    if len(texts) < 3:
        return None
    sample = texts[:: max(1, len(texts) // SAMPLE)]
    shapes = sorted(_NUMBER.sub("0", text[: 2 * PREFIX_CHARS]) + " " for text in sample)
    window = max(3, int(len(shapes) * SHARE))
    ends = zip(shapes, shapes[window - 1 :], strict=False)
    common = max((_shared(*pair) for pair in ends), key=len)[:PREFIX_CHARS]
    own = _OWN.search(common)
    if own is not None:
        common = common[: own.start()]
    bounded = _BOUNDARY.match(common)
    if bounded is not None and bounded[0].strip():
        return bounded[0]
    shared = _shared(shapes[0], shapes[-1])
    return shared[: len(shared) - len(shared.lstrip())] or None


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[:at] if at is not None else min(one, other, key=len)


def _before_anchors(texts: Sequence[str]) -> str | None:
    """What stands before most of the lines that vLLM's logger wrote, or a traceback's."""
    shapes: Counter[str] = Counter()
    anchored = 0
    for text in texts:
        anchor = anchor_of(text)
        if anchor is None:
            frame = _FRAME.search(text, 0, 200)
            anchor = frame.start() if frame else None
        if anchor is None:
            continue
        anchored += 1
        before = text[:anchor]
        if before.strip() and len(before) <= PREFIX_CHARS and "it/s" not in before:
            shapes[_NUMBER.sub("0", before)] += 1
    if not shapes:
        return None
    shape, count = shapes.most_common(1)[0]
    return shape if count >= 5 and count * 2 >= anchored else None
