"""The counts of a batch in, a small JSON document for XCom and for the file beside the results out.

Invariant: `rows` is the number of records of the input and the sum of `outcomes`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """How a batch ended.

    Seconds, speeds and tokens are of this try, up to the writing of the results, total tokens of all answers;
    `reused` rows were answered by earlier tries, `changed` were and ran again, `cut_off` were answered up to a limit of
    tokens, well or not. Speeds are over `sending_seconds`.
    `answered_by` counts the rows of this try by the server that answered: more than one entry where a restart brought
    another model or other options.
    """

    rows: int
    outcomes: dict[str, int]
    reused: int
    changed: int
    cut_off: int
    prompt_tokens: int
    completion_tokens: int
    total_prompt_tokens: int
    total_completion_tokens: int
    seconds: float
    sending_seconds: float
    rows_per_second: float
    tokens_per_second: float
    retries: int
    server_losses: int
    server_restarts: int
    answered_by: tuple[dict[str, Any], ...]
    preemptions: int
    concurrency: int
    pack: int
    model: str
    endpoint: str
    fingerprint: str
    input: tuple[str, ...]
    input_digest: str
    output_path: str | None = None
    errors_path: str | None = None
    manifest_path: str | None = None
    advice: tuple[dict[str, Any], ...] = ()
    complete: bool = True
    version: int = field(default=VERSION)

    @property
    def ok(self) -> int:
        return self.outcomes.get("ok", 0)

    @property
    def errors(self) -> int:
        return self.rows - self.ok

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values only, small whatever the size of the batch."""
        return {
            **asdict(self),
            "input": list(self.input),
            "advice": list(self.advice),
            "answered_by": list(self.answered_by),
            "ok": self.ok,
            "errors": self.errors,
        }

    def summary(self) -> str:
        """One line for the log."""
        kinds = ", ".join(
            f"{count} {name}" for name, count in sorted(self.outcomes.items()) if count
        )
        return (
            f"{self.rows} rows: {kinds}; {self.reused} reused; {self.seconds:.1f} s, "
            f"{self.rows_per_second:.1f} rows/s, {self.tokens_per_second:.0f} tokens/s; "
            f"{self.retries} retries, {self.server_losses} server losses"
        )
