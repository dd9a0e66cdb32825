"""Reads data/shapes.txt: the shapes of failures that people met in public, as short log excerpts.

A case begins with `=== name | verdict | group | number of the root line`, the number `-` where the
cause stands in no line. Paths, addresses and names in the lines are made up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from airflow_provider_vllm.diagnosis.colour import plain

DATA = Path(__file__).parent / "data" / "shapes.txt"


@dataclass(frozen=True)
class Case:
    """One excerpt and what it must come to; `root_line_number` counts from 1."""

    name: str
    verdict: str
    group: str
    root_line_number: int | None
    lines: tuple[str, ...]

    @property
    def root_line(self) -> str | None:
        """The line to blame, without its colours, if any."""
        return (
            None if self.root_line_number is None else plain(self.lines[self.root_line_number - 1])
        )


def cases() -> list[Case]:
    """All cases, in the order of the file."""
    found: list[Case] = []
    head: list[str] = []
    lines: list[str] = []
    for line in [*DATA.read_text(encoding="utf-8").splitlines(), "=== "]:
        if not line.startswith("=== "):
            lines.append(line)
            continue
        if head:
            number = None if head[3] == "-" else int(head[3])
            found.append(Case(head[0], head[1], head[2], number, tuple(lines)))
        head, lines = [part.strip() for part in line[4:].split("|")], []
    return found
