"""One run of a checked batch: wires rows, sender, watch and results together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from airflow_provider_vllm.batch import health, packing, results
from airflow_provider_vllm.batch.ahead import Ahead, Direct
from airflow_provider_vllm.batch.api import CHAT
from airflow_provider_vllm.batch.check import Checked
from airflow_provider_vllm.batch.columns import PUT_BACK, write_columns
from airflow_provider_vllm.batch.endpoint import Endpoint, ServerLink
from airflow_provider_vllm.batch.extent import digest
from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.manifest import Manifest
from airflow_provider_vllm.batch.parameters import Spelling
from airflow_provider_vllm.batch.progress import Progress
from airflow_provider_vllm.batch.reasons import told
from airflow_provider_vllm.batch.resume import Left, Resumed
from airflow_provider_vllm.batch.row import Row
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.schema import checker
from airflow_provider_vllm.batch.sender import Sender
from airflow_provider_vllm.batch.source import UNREADABLE
from airflow_provider_vllm.batch.sources import ToPath, reads_fast, records, size_of
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.verdict import ALL_ALIKE, MEND, reason_to_fail
from airflow_provider_vllm.batch.watch import Watch
from airflow_provider_vllm.exceptions import BatchFailed, JournalFailed, TooManyErrors


@dataclass(frozen=True)
class BatchResult:
    """`answers` and `errors` are filled for a list of prompts without an output path, in input order."""

    manifest: Manifest
    answers: list[Any] | None = None
    errors: list[dict[str, Any]] | None = None


class Job:
    """Runs once."""

    def __init__(
        self,
        spec: BatchSpec,
        checked: Checked,
        journal: Journal,
        resumed: Resumed,
        link: ServerLink,
        endpoint: Endpoint,
        log: logging.Logger,
        to_path: ToPath,
        on_progress: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._spec, self._checked, self._journal = spec, checked, journal
        self._resumed = resumed
        self._link, self._endpoint, self._log = link, endpoint, log
        self._to_path, self._on_progress = to_path, on_progress
        self._model = spec.model or endpoint.model
        self._began = time.monotonic()
        self._sent: float | None = None
        self._errors_at: str | None = None

    def run(self) -> BatchResult:
        spec, extent, journal = self._spec, self._checked.extent, self._journal
        left = self._resumed.left
        total = left.rows if left is not None else extent.rows
        may_pack = spec.pack != 1 and (spec.endpoint != CHAT or health.is_vllm(self._endpoint))
        maker = RowMaker(
            spec,
            self._endpoint.model,
            extent.rows,
            pack=may_pack,
            server=self._endpoint.fingerprint,
            spelling=Spelling(self._log),
        )
        short = may_pack and self._starts_short()
        found = records(spec, self._checked.sources)
        fast = reads_fast(self._checked.sources)
        sender = Sender(
            spec,
            Direct(found) if fast else Ahead(found, size_of),  # which begins to read at once
            maker,
            journal,
            self._resumed.earlier,
            self._endpoint,
            total=total,
            may_pack=may_pack,
            short=short,
            check=checker(spec.output_schema),
        )
        if spec.concurrency != "auto" and sender.stats.limit < spec.concurrency:
            self._log.warning(
                "concurrency is %d, but this process may open so few files (ulimit -n) that %d is used",
                spec.concurrency,
                sender.stats.limit,
            )
        self._began = time.monotonic()
        progress = Progress(total, self._began)
        watch = Watch(
            spec,
            self._link,
            self._endpoint,
            sender,
            journal,
            self._log,
            progress,
            self._on_progress,
        )
        try:
            sender.start()
            watch.run()
            self._sent = time.monotonic()
            return self._finish(sender, watch)
        except BatchFailed as error:
            raise self._failed(error, sender, watch) from (error.__cause__ or error)
        finally:
            sender.stop()

    def _starts_short(self) -> bool:
        """Whether the first row asks for a few tokens only: a guess where the tuning begins."""
        first = next(
            RowMaker(self._spec, self._model, pack=True).rows(
                records(self._spec, self._checked.sources)
            ),
            None,
        )
        return isinstance(first, Row) and packing.is_short(first)

    def _finish(self, sender: Sender, watch: Watch) -> BatchResult:
        spec, stats = self._spec, sender.stats
        self._journal.sync()
        results.remove_parts(spec, self._to_path)
        if stats.read != stats.done or sum(stats.outcomes.values()) != stats.done:
            raise BatchFailed(
                f"{stats.read} rows were read, but {stats.done} ended: {dict(stats.outcomes)}"
            )
        errors_at = (
            results.write_errors(spec, self._journal, stats.done, self._to_path)
            if stats.errors
            else None
        )
        reason = reason_to_fail(
            done=stats.done,
            errors=stats.errors,
            total=stats.done,
            max_error_rate=spec.max_error_rate,
            max_errors=spec.max_errors,
            finished=True,
        )
        if reason is not None:
            self._errors_at = errors_at
            raise TooManyErrors(reason)
        manifest = self._manifest(sender, watch, errors_at)
        answers, errors = self._write(stats.done, manifest)
        self._log.info("Done: %s", manifest.summary())
        if manifest.cut_off:
            self._log.warning(
                "Answers cut off by a limit of tokens (finish_reason length): %d, the first: %s; raise max_tokens or, "
                "where none was asked for, the server's max_model_len",
                manifest.cut_off,
                ", ".join(stats.first_cut_off.first()),
            )
        for advice in manifest.advice:
            self._log.info("For the next batch: %s", advice["text"])
        if stats.errors:
            where = f"; all of them: {errors_at}" if errors_at else ""
            self._log.warning(
                "%d of %d rows failed: %s%s", stats.errors, stats.done, stats.reasons, where
            )
        return BatchResult(manifest, answers, errors)

    def _write(
        self, rows: int, manifest: Manifest
    ) -> tuple[list[Any] | None, list[dict[str, Any]] | None]:
        """The results, last of all, so that where they are, everything is."""
        spec, journal, to_path = self._spec, self._journal, self._to_path
        if spec.output_path is None:
            self._remove_stale_errors(manifest)
            return results.read_answers(journal, rows)

        def before() -> None:
            self._check_unchanged()
            self._remove_stale_errors(manifest)
            self._write_manifest(manifest)

        if spec.form == "columns":
            write_columns(spec, self._checked.sources, journal, rows, to_path, before)
        else:
            results.write_lines(spec, journal, rows, to_path, before)
        return None, None

    def _remove_stale_errors(self, manifest: Manifest) -> None:
        if not manifest.errors:
            results.remove_stale(results.errors_path(self._spec), self._to_path)

    def _check_unchanged(self) -> None:
        """Raises BatchFailed where the input is not the one that was counted: the results would lack rows of it."""
        sources = self._checked.sources
        try:
            same = not sources or digest(self._spec, sources) == self._checked.extent.digest
        except UNREADABLE as error:
            raise BatchFailed(f"the input cannot be read again: {error}; {PUT_BACK}") from error
        if not same:
            raise BatchFailed(f"the input was changed while the batch ran; {PUT_BACK}")

    def _write_manifest(self, manifest: Manifest) -> None:
        if manifest.manifest_path is not None:
            with results.replacing(manifest.manifest_path, self._to_path) as file:
                file.write(orjson.dumps(manifest.to_json(), option=orjson.OPT_INDENT_2))

    def _manifest(
        self, sender: Sender, watch: Watch, errors_at: str | None, complete: bool = True
    ) -> Manifest:
        spec, stats, left = self._spec, sender.stats, self._resumed.left or Left()
        seconds = max((self._sent or time.monotonic()) - self._began, 1e-9)
        tokens = stats.prompt_tokens + stats.completion_tokens
        return Manifest(
            rows=stats.done,
            outcomes=dict(sorted(stats.outcomes.items())),
            reused=stats.reused,
            changed=left.changed + left.outdated,
            cut_off=stats.cut_off,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            total_prompt_tokens=stats.prompt_tokens + stats.reused_prompt_tokens,
            total_completion_tokens=stats.completion_tokens + stats.reused_completion_tokens,
            seconds=round(time.monotonic() - self._began, 3),
            sending_seconds=round(seconds, 3),
            rows_per_second=round(stats.sent / seconds, 2),
            tokens_per_second=round(tokens / seconds, 2),
            retries=stats.retries,
            server_losses=watch.losses,
            server_restarts=watch.restarts,
            answered_by=stats.answered_by(),
            preemptions=stats.preemptions,
            concurrency=sender.concurrency,
            pack=stats.pack,
            model=self._model,
            endpoint=spec.endpoint,
            fingerprint=self._resumed.meta.fingerprint,
            input=spec.paths,
            input_digest=self._checked.extent.digest,
            output_path=spec.output_path if complete else None,
            errors_path=errors_at,
            manifest_path=results.manifest_path(spec) if complete else None,
            advice=tuple(each.to_json() for each in watch.readings.advice()),
            complete=complete,
        )

    def _kept(self, answers: int) -> str:
        if not answers:
            return "no answer is kept: a retry sends every row"
        kept = "1 answer is" if answers == 1 else f"{answers} answers are"
        return f"{kept} kept in {self._journal.name}: a retry sends only the others"

    def _failed(self, error: BatchFailed, sender: Sender, watch: Watch) -> BatchFailed:
        """The same failure with the counts, the first errors and what to do."""
        sender.stop()
        manifest = self._manifest(sender, watch, self._errors_at, complete=False)
        self._log.warning("Failed: %s", manifest.summary())
        parts = told(str(error), sender.stats.reasons, self._errors_at)
        if isinstance(error, TooManyErrors):
            alike = not sender.stats.ok and sender.stats.reasons.are_one
            parts.append(ALL_ALIKE if alike else MEND)
        if not isinstance(error, JournalFailed):
            left = self._resumed.left or Left()
            parts.append(self._kept(max(manifest.ok, left.kept)))
        errors = None
        if self._spec.output_path is None and isinstance(error, TooManyErrors):
            errors = results.read_errors(self._journal, sender.stats.read)
        return type(error)("; ".join(parts), manifest=manifest.to_json(), errors=errors)
