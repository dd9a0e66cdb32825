"""What a rule, and what a diagnosis is.

A Rule names one cause: the message that shows it, why it happens, the one change to make first, and
whether a retry can help. Its examples and near misses are small logs, and the catalogue's test
diagnoses each. A Diagnosis is what one log comes to; its JSON form is what other parts of the
package, XCom and `diagnosis.json` carry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VERDICTS = ("failed", "healthy", "stopped", "interrupted", "stalled", "unknown")
GROUPS = (
    "capacity",
    "dead_process",
    "communication",
    "kernel_hardware",
    "model_config",
    "environment",
    "request",
    "network_auth",
    "other",
)

Remedy = Callable[[re.Match[str], Sequence[str]], dict[str, Any] | None]
"""(match, messages of all failures in the log) -> one engine argument with its value, or None."""
Details = Callable[[re.Match[str], Sequence[str], Sequence[str]], dict[str, str]]
"""(match, lines before it, lines after it) -> more values for the sentences, by name."""


@dataclass(frozen=True)
class Rule:
    """One cause.

    `pattern` is searched in a failure's whole message; its named groups, and what `details` finds
    around it, fill `explanation` and `first_action` (see template.py). `frames` is searched in the
    traceback's "path:function" lines. A `native` rule is also looked for in lines that no logger
    wrote; where it has `needs`, such a line counts only if another failure's message holds that, or
    if nothing else failed. A `victim` shows that another process failed first, so anything else is
    to blame before it. `launch` and `request` say whether starting the server again, or sending the
    request again, can help; None: it does not concern requests.
    """

    id: str
    group: str
    pattern: str
    explanation: str
    first_action: str
    launch: bool
    request: bool | None
    examples: tuple[str, ...]
    near_misses: tuple[str, ...] = ()
    frames: str | None = None
    needs: str | None = None
    native: bool = False
    victim: bool = False
    interrupts: bool = False
    remedy: Remedy | None = None
    details: Details | None = None
    confidence: float = 0.95
    compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"rule {self.id}: no such group: {self.group}")
        object.__setattr__(self, "compiled", re.compile(self.pattern))

    def match(self, message: str, frames: Sequence[str] = ()) -> re.Match[str] | None:
        """The match where this rule knows the message (and the place it was raised at)."""
        if self.frames is not None and not re.search(self.frames, "\n".join(frames)):
            return None
        return self.compiled.search(message)


@dataclass(frozen=True)
class Diagnosis:
    """What happened to one server, in the words of its own log.

    `root_line` is None where the cause stands in no line. `confidence` is 0 to 1. `context` holds
    up to three (number, line) on each side of the root line, `notes` what else is worth knowing;
    both are for readers and are not part of the JSON form.
    """

    verdict: str
    group: str
    cause: str
    explanation: str
    first_action: str
    root_line: str | None = None
    root_line_number: int | None = None
    process: str | None = None
    wrapper_lines: tuple[str, ...] = ()
    retry_launch: bool = True
    retry_request: bool | None = None
    remedy: Mapping[str, Any] | None = None
    confidence: float = 0.5
    context: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The contract's form: plain JSON values only."""
        return {
            "verdict": self.verdict,
            "group": self.group,
            "cause": self.cause,
            "root_line": self.root_line,
            "root_line_number": self.root_line_number,
            "process": self.process,
            "wrapper_lines": list(self.wrapper_lines),
            "retry": {"launch": self.retry_launch, "request": self.retry_request},
            "explanation": self.explanation,
            "first_action": self.first_action,
            "remedy": dict(self.remedy) if self.remedy is not None else None,
            "confidence": self.confidence,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Diagnosis:
        """Reads the contract's form back. Raises KeyError or ValueError where it is not one."""
        if value["verdict"] not in VERDICTS or value["group"] not in GROUPS:
            raise ValueError(f"not a diagnosis: {value['verdict']!r}, {value['group']!r}")
        return cls(
            verdict=value["verdict"],
            group=value["group"],
            cause=value["cause"],
            explanation=value["explanation"],
            first_action=value["first_action"],
            root_line=value["root_line"],
            root_line_number=value["root_line_number"],
            process=value["process"],
            wrapper_lines=tuple(value["wrapper_lines"]),
            retry_launch=value["retry"]["launch"],
            retry_request=value["retry"]["request"],
            remedy=value["remedy"],
            confidence=value["confidence"],
        )

    def short(self) -> str:
        """Cause, root line and first action, for an exception's message."""
        from airflow_provider_vllm.diagnosis.text import short_text

        return short_text(self)

    def text(self, colour: bool = False) -> str:
        """The full form for a terminal or a task log."""
        from airflow_provider_vllm.diagnosis.text import full_text

        return full_text(self, colour=colour)
