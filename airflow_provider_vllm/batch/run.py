"""One batch from its spec to its manifest: the door that operators call.

`check_inputs` finds everything that can be found wrong before a server is started; `run_batch` does
the work. Invariant: whatever ends it, an exception raised by a signal handler included, every
answer that came back is in the journal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from airflow_provider_vllm.batch.check import Checked, check_inputs, check_journal
from airflow_provider_vllm.batch.endpoint import ServerLink
from airflow_provider_vllm.batch.job import BatchResult, Job
from airflow_provider_vllm.batch.remote import journal_at
from airflow_provider_vllm.batch.resume import resume
from airflow_provider_vllm.batch.sources import ToPath, local_path
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.unsendable import refuse_hopeless

__all__ = ["BatchResult", "Checked", "check_inputs", "run_batch"]


def run_batch(
    spec: BatchSpec,
    link: ServerLink,
    *,
    journal_dir: str,
    log: logging.Logger,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    to_path: ToPath = local_path,
    checked: Checked | None = None,
    owner: str = "",
    run: str = "",
) -> BatchResult:
    """Send every row that has no good answer yet, and write the results.

    `checked` is what `check_inputs` gave for this spec, so that the input is not read once more.
    `owner` names what stays the same over the tries of one batch: the output of another is never overwritten.
    `run` names what it belongs to: of two owners in one run, only one may write an output, unless they ask the same.
    Where nothing is left to send, `link` is not asked to connect.
    Blocks in the calling thread, which must be the one that signal handlers raise in. Raises
    InvalidPrompts before anything is sent, BatchFailed by the verdict rules (with the manifest where a server was
    asked), ServerError where `link` cannot connect.
    """
    checked = checked or check_inputs(spec, to_path=to_path, journal_dir=journal_dir, owner=owner)
    checked = replace(checked, owner=owner or checked.owner, run=run or checked.run)
    journal = journal_at(journal_dir, to_path)
    endpoint = link.planned()
    # Before the lock is waited for, and again when it is held.
    check_journal(spec, checked, journal, spec.fingerprint(endpoint.model, endpoint.fingerprint))
    journal.open(checked.extent.rows)
    try:
        resumed = resume(spec, checked, journal, endpoint)
        resumed.report(log)
        if resumed.is_anything_left:
            if resumed.left is None:  # whose it is must be known while its server starts
                journal.write_meta(resumed.meta)
            elif (known := journal.read_meta()) and known.errors_path != spec.errors_path:
                journal.write_meta(replace(known, errors_path=spec.errors_path))
            refuse_hopeless(spec, checked, endpoint, to_path, log)
            planned, endpoint = endpoint, link.connect()
            judge = resumed.why and spec.on_changed_input == "fail"
            if judge or not endpoint.answers_like(planned):
                resumed = resume(spec, checked, journal, endpoint)
                if not endpoint.answers_like(planned):
                    log.info("The server is not as planned")
                    resumed.report(log)
        else:
            log.info("Nothing is left to send: no server is needed")
        journal.write_meta(resumed.meta)
        return Job(spec, checked, journal, resumed, link, endpoint, log, to_path, on_progress).run()
    finally:
        journal.close()
