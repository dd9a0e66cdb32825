"""A ServerSpec as an operator's templated field.

Airflow's templater sets attributes, and a half-rendered `{{ }}` would not validate: so what is templated is the
dict of the fields, and the ServerSpec is built when the task runs. In the serialized DAG and in the view of
rendered templates the values of `env` are masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider_vllm.environment import MASK
from airflow_provider_vllm.spec import ServerSpec

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator


class SpecTemplate:
    """The fields of a ServerSpec, rendered in place."""

    template_fields: Sequence[str] = ("fields",)

    def __init__(self, fields: Any) -> None:
        self.fields = fields

    @classmethod
    def of(cls, spec: Any, operator: BaseOperator) -> SpecTemplate:
        """What an operator keeps of its `spec`; outputs of other tasks in it become its upstream.

        Raises InvalidSpec for what can be seen before rendering.
        """
        from airflow.providers.common.compat.sdk import XComArg

        if isinstance(spec, SpecTemplate):
            return spec
        if isinstance(spec, ServerSpec):
            return cls(spec.to_json())
        if isinstance(spec, Mapping):
            ServerSpec.check_names(spec)
            spec = dict(spec)
        XComArg.apply_upstream_relationship(operator, spec)
        return cls(spec)

    def build(self) -> ServerSpec:
        """The ServerSpec. Raises InvalidSpec."""
        return ServerSpec.of(self.fields)

    def serialize(self) -> Any:
        """The form for views: Airflow calls it for the serialized DAG and the rendered template."""
        if not isinstance(self.fields, Mapping):
            return str(self.fields)
        env = self.fields.get("env")
        masked = dict.fromkeys(env, MASK) if isinstance(env, Mapping) else MASK if env else {}
        return {**self.fields, "env": masked}
