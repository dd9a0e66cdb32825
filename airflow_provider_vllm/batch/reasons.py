"""Failed rows in, what a message says of them out: how many of each kind, and which come first."""

from __future__ import annotations

import bisect
import re
from collections import Counter

from airflow_provider_vllm.batch.row import BadRow, Row, place_of

SAMPLES = 5  # rows that a message names
# What differs between two rows that fail for one reason: the quoted value, the number.
OWN = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|-?\d[\d.,]*""")
KINDS = 1000  # beyond so many they are told apart by their code alone


def sample(row: Row | BadRow, message: str) -> str:
    """One failed row in a message: its name, its place, and what is wrong."""
    return f"{row.custom_id}: {place_of(row)}: {message[:300]}"


class Samples:
    """Texts of the first few rows, in the order of the input."""

    def __init__(self) -> None:
        self._found: list[tuple[int, str]] = []

    def wants(self, number: int) -> bool:
        """Whether row `number` is among the first few so far."""
        return len(self._found) < SAMPLES or number < self._found[-1][0]

    def add(self, number: int, text: str) -> None:
        bisect.insort(self._found, (number, text))
        del self._found[SAMPLES:]

    def first(self, most: int = SAMPLES) -> list[str]:
        return [text for _, text in self._found[:most]]


class Reasons:
    """Why rows failed, by the code of their error and its words: how many, and the first few of each."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._samples: dict[tuple[str, str], Samples] = {}

    def add(self, row: Row | BadRow, code: str, message: str) -> None:
        kind = (code, OWN.sub("_", message[:300]))
        if kind not in self._counts and len(self._counts) >= KINDS:
            kind = (code, "")
        self._counts[kind] += 1
        known = self._samples.setdefault(kind, Samples())
        if known.wants(row.number):
            known.add(row.number, sample(row, message))

    @property
    def are_one(self) -> bool:
        """Whether all have one code."""
        return len({code for code, _ in self._counts}) == 1

    def __str__(self) -> str:
        """The most frequent first, each with a row at least; empty where there are none."""
        kinds = self._counts.most_common(SAMPLES)
        spare = SAMPLES - len(kinds)
        parts = []
        for kind, count in kinds:
            shown = self._samples[kind].first(1 + spare)
            spare -= len(shown) - 1
            some = f"{count} x {kind[0]}, as " if count > 1 else ""
            parts.append(some + " | ".join(shown))
        left = self._counts.total() - sum(count for _, count in kinds)
        return " | ".join([*parts, f"{left} others"] if left else parts)


def told(reason: str, reasons: Reasons, errors_at: str | None) -> list[str]:
    """The parts of a message: why the batch fails, on which rows, and where all of them are."""
    parts = [reason]
    if first := str(reasons):
        parts.append(f"first errors: {first}")
    if errors_at:
        parts.append(f"all errors: {errors_at}")
    return parts
