"""How each row ended: into the journal, the counts and the verdict.

Invariant: every row that was read ends here once, as `ok`, `reused`, or with the name of its failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from airflow_provider_vllm.batch.answers import (
    TAIL,
    Check,
    InvalidOutput,
    NotAnAnswer,
    answer,
    bad_row_line,
    error_line,
    still_keeps,
    was_cut_off,
)
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.records import END, Reader, head
from airflow_provider_vllm.batch.row import BadRow, Row
from airflow_provider_vllm.batch.signals import Server, Stats
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.verdict import reason_to_fail
from airflow_provider_vllm.exceptions import TooManyErrors


class Ledger:
    """Writes the ends of rows. `verdict` is set when so many failed that the batch fails."""

    def __init__(
        self,
        spec: BatchSpec,
        journal: Journal,
        stats: Stats,
        total: int,
        check: Check | None,
    ) -> None:
        self._spec, self._journal, self._stats = spec, journal, stats
        self._total, self._check = total, check
        self._add = journal.add
        self._reader: Reader | None = None
        self.flush = journal.flush
        self.verdict: TooManyErrors | None = None

    def answered(
        self, replies: Iterable[tuple[Row, bytes]], sums: tuple[int, int] | None = None
    ) -> list[tuple[Row, bytes, NotAnAnswer | InvalidOutput]]:
        """Replies with status 200; what is no good answer among them comes back with what is wrong.

        `sums` are the tokens of all, where they came as one pack.
        """
        wrong: list[tuple[Row, bytes, NotAnAnswer | InvalidOutput]] = []
        stats, check, add = self._stats, self._check, self._add
        good = prompts = completions = 0
        for row, raw in replies:
            try:
                start, body, prompt, completion, cut_off = answer(row, raw, check, sums)
            except NotAnAnswer as error:
                wrong.append((row, raw, error))
                continue  # a pack's sum goes to the first answer
            except InvalidOutput as error:
                wrong.append((row, raw, error))
                prompt, completion, cut_off = error.counts
            else:
                add(row.number, True, start, body, TAIL)
                good += 1
            prompts += prompt
            completions += completion
            if cut_off:
                stats.was_cut_off(row)
            sums = sums and (0, 0)
        stats.done += good
        stats.ok += good
        stats.prompt_tokens += prompts
        stats.completion_tokens += completions
        return wrong

    def is_still_good(self, position: int) -> bool:
        """Whether an earlier try's answer keeps to the schema as it is checked now."""
        return self._check is None or still_keeps(self._earlier().line(position), self._check)

    def _earlier(self) -> Reader:
        self._reader = self._reader or self._journal.reader()
        return self._reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def reused(self, row: Row, position: int) -> None:
        """An earlier try has the answer."""
        self._journal.claim(row.number, position)
        prompt, completion = self._earlier().tokens(position)
        stats = self._stats
        if was_cut_off(self._earlier().line(position)):
            stats.was_cut_off(row)
        stats.reused += 1
        stats.done += 1
        stats.ok += 1
        stats.reused_prompt_tokens += prompt
        stats.reused_completion_tokens += completion

    def begins(self, endpoint: Endpoint) -> None:
        """From here on `endpoint` answers. Where that is another model, later tries must know which rows are its."""
        stats = self._stats
        server = Server(endpoint.model, endpoint.fingerprint, stats.ok - stats.reused)
        if stats.servers and replace(stats.servers[-1], before=server.before) == server:
            return
        if stats.servers:
            self._journal.note_server()
        stats.servers.append(server)

    def lost(self, row: Row) -> None:
        """The server was lost with this row in flight; later tries should know."""
        self._journal.note_loss(row.key, row.number)

    def invalid(self, row: BadRow) -> None:
        """A record that cannot be sent."""
        self._end(row, "invalid_input", row.code, row.message, bad_row_line(row))

    def failed(
        self,
        row: Row,
        outcome: str,
        code: str,
        message: str,
        *,
        status: int | None = None,
        body: bytes | None = None,
    ) -> None:
        """The last word on a row that was sent; `status` and `body` are what the server said, if it did."""
        line = error_line(row, code, message, status=status, body=body)
        self._end(row, outcome, code, message, line)

    def _end(self, row: Row | BadRow, outcome: str, code: str, message: str, line: bytes) -> None:
        start = head(row.key, row.number, outcome.encode())
        self._add(row.number, False, start, line, END)
        stats = self._stats
        stats.done += 1
        stats.failed[outcome] += 1
        stats.reasons.add(row, code, message)
        reason = reason_to_fail(
            done=stats.done,
            errors=stats.errors,
            total=self._total,
            max_error_rate=self._spec.max_error_rate,
            max_errors=self._spec.max_errors,
            finished=False,
        )
        if reason is not None:
            self.verdict = self.verdict or TooManyErrors(reason)
