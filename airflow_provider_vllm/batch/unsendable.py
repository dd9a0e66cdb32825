"""The rows of an input that cannot be sent, looked for before a server is started.

Invariants: nothing is sent, and the journal is not written; an input whose first rows are good is not read on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import orjson

from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.answers import bad_row_line
from airflow_provider_vllm.batch.check import Checked
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.reasons import Reasons, told
from airflow_provider_vllm.batch.row import BadRow, Row, place_of
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.source import UNREADABLE
from airflow_provider_vllm.batch.sources import ToPath, records
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.verdict import MEND, reason_to_fail
from airflow_provider_vllm.exceptions import UnsendableRows

LOOK = 10_000  # rows: some tenths of a second


@dataclass
class Found:
    """`read` rows, of which `count` cannot be sent; the first `LOOK` of those are `rows`. `reason`: to fail.

    `first` is the first that can.
    """

    read: int = 0
    count: int = 0
    rows: list[BadRow] = field(default_factory=list)
    reason: str | None = None
    first: Row | None = None


def refuse_hopeless(
    spec: BatchSpec, checked: Checked, endpoint: Endpoint, to_path: ToPath, log: logging.Logger
) -> None:
    """Raises UnsendableRows where so many rows cannot be sent that the batch fails, whatever a server answers.

    The message names the first of them, and the errors file where that holds all; of a list of prompts without an
    output the error has those that were read. The log says where a row asks for a model that the server will not have.
    """
    total = checked.extent.rows
    try:
        found = look(spec, checked, endpoint.model, total)
    except UNREADABLE:
        return  # the sending comes to it too, and keeps what was answered until then
    if found.first is not None and endpoint.names:
        _see_model(found.first, endpoint.names, log)
    if found.reason is None:
        return
    errors_at = errors = None
    lines = [bad_row_line(row) for row in found.rows]
    if spec.output_path is None:
        pairs = zip(found.rows, lines, strict=True)
        errors = [results.error_of(row.number, orjson.loads(line)) for row, line in pairs]
    if found.read == total and found.count == len(found.rows):
        errors_at = results.write_error_lines(spec, lines, to_path)
    reason = f"{found.reason}: they cannot be sent, and so no server was asked"
    reasons = Reasons()
    for row in found.rows:
        reasons.add(row, row.code, row.message)
    raise UnsendableRows("; ".join([*told(reason, reasons, errors_at), MEND]), errors=errors)


def _see_model(row: Row, names: tuple[str, ...], log: logging.Logger) -> None:
    """A row of a batch file names its model itself, often that of another server."""
    asked = orjson.loads(row.body).get("model")
    if asked not in names:
        log.warning(
            "%s (%s) asks for the model %r, and the server will have %s: such rows are answered with 404, unless an "
            "adapter of that name is loaded; set served_model_name in the spec, or take `model` out of the rows",
            row.custom_id,
            place_of(row),
            asked,
            ", ".join(sorted({name for name in names if name})),
        )


def look(spec: BatchSpec, checked: Checked, model: str, total: int) -> Found:
    """Read `LOOK` of `total` rows, and on for as long as too many are bad and nothing is certain."""
    found = Found()
    maker = RowMaker(spec, model, min(total, LOOK))
    for row in maker.rows(records(spec, checked.sources)):
        found.read += 1
        if isinstance(row, Row):
            found.first = found.first or row
        else:
            found.count += 1
            if found.count <= LOOK:
                found.rows.append(row)
        if found.read >= LOOK:
            found.reason = _reason(spec, found, total)
            if found.reason or found.count <= spec.max_error_rate * found.read:
                return found
    found.reason = _reason(spec, found, total)
    return found


def _reason(spec: BatchSpec, found: Found, total: int) -> str | None:
    return reason_to_fail(
        done=found.read,
        errors=found.count,
        total=total,
        max_error_rate=spec.max_error_rate,
        max_errors=spec.max_errors,
        finished=found.read == total,
    )
