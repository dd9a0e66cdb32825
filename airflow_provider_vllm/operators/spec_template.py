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

        if isinstance(spec, ServerSpec):
            return cls(spec.to_json())
        if isinstance(spec, Mapping):
            ServerSpec.check_names(spec)
            spec = dict(spec)
            if isinstance(spec.get("env"), HiddenEnv):
                spec["env"] = spec["env"].variables
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


class HiddenEnv:
    """`env` of a spec among the fixed arguments of a mapped task, which Airflow stores as they are
    given: as text, its values masked."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self.variables = variables

    def __repr__(self) -> str:
        return repr(dict.fromkeys(self.variables, MASK))


class TakesSpec:
    """Mixin of the operators with an argument `spec`: masks its `env` in `.partial()` as well.

    In `.expand(spec=[...])` give ServerSpec objects, whose text form has no `env`.
    """

    @classmethod
    def partial(cls, **arguments: Any) -> Any:
        spec = arguments.get("spec")
        if isinstance(spec, Mapping) and isinstance(spec.get("env"), Mapping):
            arguments["spec"] = {**spec, "env": HiddenEnv(spec["env"])}
        return super().partial(**arguments)  # type: ignore[misc]
