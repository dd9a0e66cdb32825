"""Where a batch sends its rows, and how it asks for another place when that one is lost.

`Endpoint` is what the client needs to send a request. `ServerLink` is all that the batch knows
about a server's life: the runner calls it, the Airflow operator gives one in. There are three: a server that
the task owns, a server handle from another task, and an endpoint that somebody else runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server that is ready.

    `base_url` ends before `/v1` (for example `http://127.0.0.1:8000`); `model` is the name to send; `api_key`
    is kept out of `repr`. `owned` says whether the server is one of ours, that can be restarted. `fingerprint`
    changes with whatever can change an answer (weights, engine options, adapters); empty where unknown. `names` are
    the models that it will answer as, where that is known before it is started.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    owned: bool = False
    fingerprint: str = ""
    names: tuple[str, ...] = ()

    def answers_like(self, other: Endpoint) -> bool:
        """Whether both give the same answers, as far as is known."""
        return (self.model, self.fingerprint) == (other.model, other.fingerprint)


# Asks a server for a sign of life that a frozen engine cannot give: None where it answers, else what it said.
Probe = Callable[[Endpoint], str | None]


class ServerLink(Protocol):
    """What the runner asks of the server's life. All methods may block; the runner calls them off its event loop."""

    def planned(self) -> Endpoint:
        """What `connect` is expected to give, without starting or asking anything; `base_url` may be empty."""
        ...

    def connect(self) -> Endpoint:
        """The endpoint to use now. Raises ServerLost or ServerUnreachable when there is none."""
        ...

    def renew(self) -> None:
        """Say that the batch moves, so that the server's lease is extended. Never raises for a lost server."""
        ...

    def recover(self, reason: str, *, by_row: bool, probe: Probe) -> Endpoint:
        """Called once for each loss: bring the server back (own: start it again; foreign: wait for it).

        `by_row` says that a row which was alone in flight is to blame, not the server. One that is waited for is
        back when `probe` says so: a frozen engine lists its models too.

        Raises ServerLost, with the diagnosis where there is one, when it can't be brought back, and
        NoFreeGpu, which ends the run of the batch with its rows kept.
        """
        ...
