"""What the sender's thread and the watch say to each other, and the numbers that both read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.reasons import Reasons, Samples
from airflow_provider_vllm.batch.row import Row, place_of


@dataclass(frozen=True)
class Server:
    """One that answered; `before` is the number of rows that were answered in this try when it began."""

    model: str
    fingerprint: str
    before: int


@dataclass
class Stats:
    """Written by the sender, read by the watch, `preemptions` the other way round. `done` is the sum of `outcomes`."""

    read: int = 0
    done: int = 0
    ok: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    cut_off: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_prompt_tokens: int = 0
    reused_completion_tokens: int = 0
    retries: int = 0
    refused: int = 0
    preemptions: int = 0
    in_flight: int = 0
    limit: int = 0
    pack: int = 1
    reasons: Reasons = field(default_factory=Reasons)
    servers: list[Server] = field(default_factory=list)
    first_cut_off: Samples = field(default_factory=Samples)

    def was_cut_off(self, row: Row) -> None:
        """A limit of tokens ended the answer to this row."""
        self.cut_off += 1
        if self.first_cut_off.wants(row.number):
            self.first_cut_off.add(row.number, f"{row.custom_id} ({place_of(row)})")

    @property
    def sent(self) -> int:
        """Rows whose end the server has decided in this try."""
        return self.done - self.reused - self.failed["invalid_input"]

    @property
    def errors(self) -> int:
        return self.done - self.ok

    @property
    def outcomes(self) -> dict[str, int]:
        return {"ok": self.ok, **self.failed}

    def answered_by(self) -> tuple[dict[str, Any], ...]:
        """How many rows each server answered in this try."""
        ends = [*(server.before for server in self.servers[1:]), self.ok - self.reused]
        return tuple(
            {
                "model": server.model,
                "fingerprint": server.fingerprint,
                "rows": end - server.before,
            }
            for server, end in zip(self.servers, ends, strict=False)
        )


@dataclass(frozen=True)
class Trouble:
    """Event: rows failed in a way that a dead server explains. The watch looks at its health."""

    reason: str


@dataclass(frozen=True)
class NeedServer:
    """Event: the server is given up and rows are left. The watch brings one back.

    `in_flight` are the rows that it had. `by_row`: it had one alone, and has answered others since the last loss of
    that kind, so the row is to blame.
    """

    reason: str
    in_flight: tuple[Row, ...] = ()
    by_row: bool = False


@dataclass(frozen=True)
class Ended:
    """Event: the thread is over; `failure` says why when rows are left."""

    failure: BaseException | None


@dataclass(frozen=True)
class Healthy:
    """Command: the server lives, so rows that failed before this moment (monotonic seconds) failed on their own."""

    before: float


@dataclass(frozen=True)
class Lost:
    """Command: the server is dead or frozen. Give up what is in flight."""

    reason: str


@dataclass(frozen=True)
class Connect:
    """Command: send to this endpoint from now on."""

    endpoint: Endpoint
