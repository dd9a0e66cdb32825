"""A ServerSpec as an operator's templated field.

Airflow's templater sets attributes, and a half-rendered `{{ }}` would not validate: so what is templated is the
dict of the fields, and the ServerSpec is built when the task runs. In the serialized DAG and in the view of
rendered templates the values of `env` are masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_vllm.environment import MASK
from airflow_provider_vllm.names import refuse_misplaced
from airflow_provider_vllm.operators.literals import Literals, naming
from airflow_provider_vllm.spec import ServerSpec

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

SPEC_PLACES = {name: f"spec=ServerSpec({name}=...)" for name in ServerSpec.__dataclass_fields__}


class SpecTemplate:
    """The fields of a ServerSpec, rendered in place."""

    template_fields: Sequence[str] = ("fields",)

    def __init__(self, fields: Any) -> None:
        self.fields = fields

    @classmethod
    def of(cls, spec: Any, operator: BaseOperator) -> SpecTemplate:
        """What an operator keeps of its `spec`; outputs of other tasks in it become its upstream."""
        from airflow.providers.common.compat.sdk import XComArg

        if isinstance(spec, ServerSpec):
            return cls(spec.to_json())
        if isinstance(spec, Mapping):
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
    """Mixin of the operators with an argument `spec`: masks its `env` in `.partial()`, and looks at
    literal arguments while the DAG file is read.

    In `.expand(spec=[...])` give ServerSpec objects, whose text form has no `env`.
    """

    # How to write what is no argument of the operator.
    places: ClassVar[Mapping[str, str]] = SPEC_PLACES

    @classmethod
    def partial(cls, **arguments: Any) -> Any:
        with naming(cls.__name__, str(arguments.get("task_id"))):
            cls.check_arguments(arguments, Literals(arguments.get("dag")), complete=False)
        spec = arguments.get("spec")
        if isinstance(spec, Mapping) and isinstance(spec.get("env"), Mapping):
            arguments["spec"] = {**spec, "env": HiddenEnv(spec["env"])}
        try:
            return super().partial(**arguments)  # type: ignore[misc]
        except TypeError:
            with naming(cls.__name__, str(arguments.get("task_id"))):
                refuse_misplaced(arguments, cls.places)
            raise

    @classmethod
    def check_arguments(
        cls, arguments: Mapping[str, Any], literals: Literals, *, complete: bool
    ) -> None:
        """Raises InvalidInput for what is wrong with literal arguments. `complete`: False where more
        are to come, as in `.partial()`."""
        if complete or "spec" in arguments:
            literals.check_spec(arguments["spec"])
