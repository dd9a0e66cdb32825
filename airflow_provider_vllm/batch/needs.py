"""Which columns a row needs to make a request of a spec."""

from __future__ import annotations

from collections.abc import Collection

from airflow_provider_vllm.batch.api import PAIR_FIELDS
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.template import Template

PROMPT_COLUMNS = ("prompt", "messages", "text", "input")


def prompt_columns(spec: BatchSpec) -> tuple[str, ...]:
    """Those that may hold the prompt, the first that is not empty first."""
    return (spec.prompt_column,) if spec.prompt_column else PROMPT_COLUMNS


def lacks(spec: BatchSpec, columns: Collection[str]) -> str | None:
    """What a row of these columns lacks to make a request of a spec; None: nothing."""
    if (pairs := PAIR_FIELDS.get(spec.endpoint)) is not None:
        if any(all(name in columns for name in group) for group in pairs):
            return None
        return f"needs the columns {' or '.join(' and '.join(group) for group in pairs)}"
    if spec.prompt_template:
        missing = [name for name in Template(spec.prompt_template).names if name not in columns]
        return f"no column {' and '.join(missing)}, which prompt_template has" if missing else None
    names = prompt_columns(spec)
    if any(name in columns for name in names):
        return None
    return f"no column {' or '.join(names)}; set prompt_column or prompt_template"
