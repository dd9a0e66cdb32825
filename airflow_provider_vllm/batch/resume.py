"""A journal and a batch in, what of the batch is still to be sent out: known before any server is started.

Invariant: nothing is written, and the server is asked nothing; the whole input is read once where there are earlier
answers, and not at all where there are none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import orjson

from airflow_provider_vllm.batch.answers import still_keeps
from airflow_provider_vllm.batch.check import Checked, check_journal, meta_of
from airflow_provider_vllm.batch.compact import IntSet
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.journal import Earlier, Journal
from airflow_provider_vllm.batch.meta import Meta
from airflow_provider_vllm.batch.row import BadRow, Row
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.schema import checker
from airflow_provider_vllm.batch.source import UNREADABLE
from airflow_provider_vllm.batch.sources import records
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed


@dataclass(frozen=True)
class Left:
    """How the rows of an input stand to earlier answers. `changed` and `outdated` are among those `to_send`.

    `kept` are answered; `changed` were, to another request, or by another server; `outdated` were, and break the
    schema as it is checked now; `invalid` are never sent.
    """

    kept: int = 0
    changed: int = 0
    outdated: int = 0
    invalid: int = 0
    to_send: int = 0

    @property
    def rows(self) -> int:
        return self.kept + self.invalid + self.to_send


@dataclass(frozen=True)
class Resumed:
    """Where a batch goes on. `earlier` and `left` are None for one that begins; `why` names what changed."""

    meta: Meta
    earlier: Earlier | None = None
    left: Left | None = None
    why: tuple[str, ...] = ()

    @property
    def is_anything_left(self) -> bool:
        """Whether a server is needed."""
        return self.left is None or self.left.to_send > 0

    def report(self, log: logging.Logger) -> None:
        """One line, where there were answers."""
        if self.left is not None:
            again = self.left.changed + self.left.outdated
            log.log(logging.WARNING if again else logging.INFO, self._text(self.left))

    def _text(self, left: Left) -> str:
        again = left.changed + left.outdated
        reasons = f" ({' and '.join(self.why)})" if again and self.why else ""
        invalid = f", {left.invalid} that cannot be sent" if left.invalid else ""
        return (
            f"Resuming: {left.rows} rows, {left.kept} answered before and kept, {again} changed and run again"
            f"{reasons}{invalid}, {left.to_send} to send"
        )


def resume(spec: BatchSpec, checked: Checked, journal: Journal, endpoint: Endpoint) -> Resumed:
    """What an open journal holds for this batch on this endpoint, of which only the name and fingerprint matter.

    One without a URL is only planned, and may answer otherwise when it is there. Raises InvalidPrompts for another
    batch's journal, JournalFailed for a damaged one, and BatchFailed for a changed input where `on_changed_input`
    is "fail".
    """
    fingerprint = spec.fingerprint(endpoint.model, endpoint.fingerprint)
    meta = check_journal(spec, checked, journal, fingerprint)
    now = meta_of(spec, checked, fingerprint)
    earlier = journal.earlier()
    if not earlier.had_answers:
        return Resumed(now, earlier if earlier.deaths else None)
    why = _changes(meta, now)
    is_final = meta is None or meta.input != now.input or bool(endpoint.base_url)
    if why and is_final and spec.on_changed_input == "fail":
        raise BatchFailed(
            f"{' and '.join(why)} since an earlier try, whose {len(earlier.answers)} answers are in {journal.name}; "
            'put it back, or set on_changed_input="rerun"'
        )
    maker = RowMaker(spec, endpoint.model, checked.extent.rows, server=endpoint.fingerprint)
    with _goodness(spec, journal) as is_good:
        try:
            rows = maker.rows(records(spec, checked.sources))
            left = count(rows, earlier, is_good, journal.answered_ids)
        except UNREADABLE as error:
            raise BatchFailed(
                f"the input cannot be read again: {error}; put it back, and retry"
            ) from error
    if earlier.mixed:
        why += ("another server had answered after a restart",)
    if left.outdated:
        why += ("the answer breaks the schema as it is checked now",)
    return Resumed(now, earlier, left, why)


def count(
    rows: Iterator[Row | BadRow],
    earlier: Earlier,
    is_good: Callable[[int], bool],
    answered_ids: Callable[[], Iterator[bytes]],
) -> Left:
    """`is_good` says whether the answer at a position may be kept; `answered_ids` is read where some are not."""
    kept = outdated = invalid = to_send = 0
    find, asked = earlier.answers.get, IntSet()
    for row in rows:
        if isinstance(row, BadRow):
            invalid += 1
        elif (at := find(int(row.key, 16))) is None:
            to_send += 1
            asked.add(hash(orjson.dumps(row.custom_id)))
        elif is_good(at):
            kept += 1
        else:
            to_send += 1
            outdated += 1
    changed = 0
    if to_send > outdated and (earlier.mixed or kept + outdated < len(earlier.answers)):
        once = IntSet()
        numbers = map(hash, answered_ids())
        changed = sum(1 for number in numbers if number in asked and once.add(number))
    return Left(kept, changed, outdated, invalid, to_send)


@contextmanager
def _goodness(spec: BatchSpec, journal: Journal) -> Iterator[Callable[[int], bool]]:
    """Whether the answer at a position keeps to the schema."""
    check = checker(spec.output_schema)
    if check is None:
        yield lambda position: True
        return
    reader = journal.reader()
    try:
        yield lambda position: still_keeps(reader.line(position), check)
    finally:
        reader.close()


def _changes(meta: Meta | None, now: Meta) -> tuple[str, ...]:
    if meta is None:
        return ()
    return tuple(
        f"{what} changed"
        for what, changed in (
            ("the input", meta.input != now.input),
            ("the model, the template or the parameters", meta.fingerprint != now.fingerprint),
        )
        if changed
    )
