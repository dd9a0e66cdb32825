"""What a check says: a frozen Finding, with its number and the setting to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that will fail, or that probably will.

    `check` is a stable id, `level` "error" where the start cannot succeed, `message` what was found
    with its number, `fix` the setting to change. `passes`: others hold what is missing, so that it may
    be there at the next try.
    """

    check: str
    level: Literal["error", "warning"]
    message: str
    fix: str
    passes: bool = False

    def __str__(self) -> str:
        return f"[{self.check}] {self.message} {self.fix}"


def error(check: str, message: str, fix: str, *, passes: bool = False) -> Finding:
    return Finding(check, "error", message, fix, passes)


def warning(check: str, message: str, fix: str) -> Finding:
    return Finding(check, "warning", message, fix)
