"""What of an operator's arguments is known while the DAG file is read.

Templates, outputs of other tasks and callables get their value when the task runs: what is wrong with
them can only be said then. Everything else is literal, and a mistake in it is an import error of the DAG.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ContextDecorator, contextmanager
from typing import Any

from airflow_provider_vllm.exceptions import InvalidHandle, InvalidInput
from airflow_provider_vllm.names import type_of
from airflow_provider_vllm.spec import ServerSpec

STAND_IN = "rendered-when-the-task-runs"
# What opens a template, and the arguments of a DAG's `jinja_environment_kwargs` that change it.
_MARKS = {
    "variable_start_string": "{{",
    "block_start_string": "{%",
    "comment_start_string": "{#",
}
# Fields of a ServerSpec whose values may be any text.
_TEXT_MAPPINGS = ("engine_args", "env", "lora_modules")


class Literals:
    """Tells literal values from those that are rendered, with the template marks of a DAG."""

    def __init__(self, dag: Any = None) -> None:
        changed = getattr(dag, "jinja_environment_kwargs", None) or {}
        self._marks = tuple(changed.get(name, mark) for name, mark in _MARKS.items())

    def known(self, value: Any) -> bool:
        """Whether `value`, and all that is in it, is as it will be when the task runs."""
        if isinstance(value, str):
            return not any(mark in value for mark in self._marks)
        if isinstance(value, Mapping):
            return all(self.known(item) for item in value.values())
        if isinstance(value, (Sequence, Set)):
            return isinstance(value, (bytes, range)) or all(self.known(item) for item in value)
        return not is_resolved(value)

    def filled(self, value: Any) -> Any:
        """The same with STAND_IN in place of what is not known; mappings and lists are copied."""
        if isinstance(value, Mapping):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.filled(item) for item in value]
        return value if self.known(value) else STAND_IN

    def known_items(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """The items of a mapping whose values are known."""
        return {name: item for name, item in value.items() if self.known(item)}

    def check_spec(self, spec: Any) -> None:
        """Raises InvalidSpec for what is wrong with the literal fields of a `spec`."""
        if isinstance(spec, Mapping):
            ServerSpec.check_names(spec)
            ServerSpec.of(self._literal_fields(spec))
        elif self.known(spec) and not callable(spec):
            ServerSpec.of(spec)

    def check_server(self, server: Any) -> None:
        """Raises InvalidHandle for a literal `server` that can be no handle; None is fine."""
        if isinstance(server, ContextDecorator):
            raise InvalidHandle(
                "server is a context that was not entered: write `with vllm_server(...) as server:`."
            )
        if server is None or isinstance(server, Mapping) or callable(server):
            return
        if self.known(server):
            raise InvalidHandle(
                f"server is {type_of(server)}: give the output of a StartVllmServerOperator or of "
                "vllm_server(); a server of the task's own is VllmBatchOperator(spec=...)."
            )

    def _literal_fields(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        fields = self.known_items(spec)
        for name, value in spec.items():
            if name in ("model", "auth_conn_id") and name not in fields:
                fields[name] = STAND_IN
            elif name in _TEXT_MAPPINGS and isinstance(value, Mapping):
                fields[name] = self.filled(value)
        return fields


def is_resolved(value: Any) -> bool:
    """Whether Airflow asks `value` for what it stands for, as it does with another task's output."""
    return not isinstance(value, (type, os.PathLike)) and callable(getattr(value, "resolve", None))


class _Later:
    """Stands for an argument that another task, or `.expand()`, brings."""

    def resolve(self) -> None: ...


LATER = _Later()


@contextmanager
def naming(kind: str, task_id: str) -> Iterator[None]:
    """Puts the operator and the task before the message of an InvalidInput."""
    try:
        yield
    except InvalidInput as error:
        raise type(error)(f"{kind} {task_id!r}: {error}") from None
