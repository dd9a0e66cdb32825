"""One record of the input on its way: a `Row` that is sent, or a `BadRow` that cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from airflow_provider_vllm.batch.spec import suffix_of

PROMPTS = "prompts"  # the name of a list as a source


class Row(msgspec.Struct, eq=False):
    """One request. `key` is 16 hex digits; `source` and `line` are where it stands, from 1.

    `attempts` counts its failed tries, `deaths` the losses of the server that it was in flight at, `refusals` those of
    the server that began at `refused_since`, for which it `paused` so many seconds;
    `params` and `prompt` are set where it may be packed. A Struct, since one is made for every row of the input.
    """

    number: int
    custom_id: str
    url: str
    body: bytes
    key: bytes
    source: str = PROMPTS
    line: int = 0
    attempts: int = 0
    deaths: int = 0
    refused_since: float = -1.0
    refusals: int = 0
    paused: float = 0.0
    params: bytes | None = None
    prompt: Any = None


@dataclass(frozen=True)
class BadRow:
    """A record that is never sent: where it stands, what is wrong, in which field."""

    number: int
    custom_id: str
    code: str
    message: str
    source: str
    line: int
    field: str | None = None

    @property
    def text(self) -> str:
        """Where it stands and what is wrong, for log and errors file."""
        return f"{place_of(self)}: {self.message}"

    @property
    def key(self) -> bytes:
        """The number of the row: a broken record has no request to take a fingerprint of."""
        return b"%016x" % self.number


def place_of(row: Row | BadRow) -> str:
    """Where a record stands, for a message."""
    lines = row.source != PROMPTS and suffix_of(row.source) != ".parquet"
    return f"{row.source}, {'line' if lines else 'row'} {row.line}"
