"""A ServerSpec as an operator's templated field.

Airflow's templater sets attributes, and a half-rendered `{{ }}` would not validate: so what is templated is the
dict of the fields, and the ServerSpec is built when the task runs.

Invariant: no value of `env` is in the serialized DAG or in the view of rendered templates, wherever in a DAG file
the spec stands: at an operator, in `.partial()`, `.expand()` or `.expand_kwargs()`, or in `default_args`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.definitions.mappedoperator import OperatorPartial

from airflow_provider_vllm.environment import MASK
from airflow_provider_vllm.names import refuse_misplaced
from airflow_provider_vllm.operators.literals import LATER, Literals, naming
from airflow_provider_vllm.spec import ServerSpec

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.definitions.mappedoperator import MappedOperator

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
        hide_defaults(operator.get_dag())
        if isinstance(spec, Mapping):
            spec = dict(spec)
            if isinstance(spec.get("env"), Mapping):
                spec["env"] = {name: shown(value) for name, value in spec["env"].items()}
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


class Hidden:
    """A value of `env` among arguments that Airflow stores as they are given: as text, masked."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return MASK


def hidden(spec: Any) -> Any:
    """A `spec` argument with the values of its `env` hidden; outputs of other tasks stay what they are."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("env"), Mapping):
        return spec
    env = {
        name: Hidden(value) if isinstance(value, str) else value
        for name, value in spec["env"].items()
    }
    return {**spec, "env": env}


def shown(value: Any) -> Any:
    return value.value if isinstance(value, Hidden) else value


def hide_defaults(dag: Any) -> None:
    """Hide the `env` of a spec in a DAG's own copy of its `default_args`."""
    defaults = getattr(dag, "default_args", None) or {}
    if "spec" in defaults:
        defaults["spec"] = hidden(defaults["spec"])


class HidingPartial(OperatorPartial):
    """What `.partial()` gives: hides the `env` of the specs that it is expanded over, and looks at the
    arguments once they are complete."""

    def expand(self, **mapped: Any) -> MappedOperator:
        later = dict.fromkeys(mapped, LATER)
        self._check(later)
        for name, values in mapped.items():
            for value in values if isinstance(values, (list, tuple)) else ():
                self._check({**later, name: value})
        if isinstance(specs := mapped.get("spec"), (list, tuple)):
            mapped["spec"] = [hidden(spec) for spec in specs]
        return super().expand(**mapped)

    def expand_kwargs(self, kwargs: Any, **how: Any) -> MappedOperator:
        if isinstance(kwargs, (list, tuple)):
            for each in kwargs:
                if isinstance(each, Mapping):
                    self._check(each)
            kwargs = [
                {**each, "spec": hidden(each["spec"])}
                if isinstance(each, Mapping) and "spec" in each
                else each
                for each in kwargs
            ]
        return super().expand_kwargs(kwargs, **how)

    def _check(self, mapped: Mapping[str, Any]) -> None:
        """Raises InvalidInput for what is wrong with literal arguments, those of one mapped task."""
        self._expand_called = True  # an error is no reason for a warning that it was never mapped
        if not is_ours(self.operator_class):
            return
        dag, group = self.kwargs.get("dag"), self.kwargs.get("task_group")
        given: dict[str, Any] = {}
        for owner in (dag, group):
            given |= dict.fromkeys(getattr(owner, "default_args", None) or {}, LATER)
        given |= self.kwargs
        if given.get("spec") is not None:
            given["spec"] = LATER  # `partial()` has looked at it
        with naming(self.operator_class.__name__, str(self.kwargs.get("task_id"))):
            check: Any = self.operator_class
            check.check_arguments({**given, **mapped}, Literals(dag), complete=True)


def is_ours(operator_class: type) -> bool:
    """Whether a class's arguments are those that we know: a subclass elsewhere may have others."""
    return operator_class.__module__.startswith(__package__ or "")


class TakesSpec:
    """Mixin of the operators with an argument `spec`: masks its `env` in mapped tasks as well, and looks at
    literal arguments while the DAG file is read."""

    # How to write what is no argument of the operator.
    places: ClassVar[Mapping[str, str]] = SPEC_PLACES

    @classmethod
    def partial(cls, **arguments: Any) -> Any:
        if is_ours(cls):
            with naming(cls.__name__, str(arguments.get("task_id"))):
                cls.check_arguments(arguments, Literals(arguments.get("dag")), complete=False)
        try:
            partial = super().partial(**arguments)  # type: ignore[misc]
        except TypeError:
            with naming(cls.__name__, str(arguments.get("task_id"))):
                refuse_misplaced(arguments, cls.places)
            raise
        partial._expand_called = True  # it has a successor, and would say that it was never mapped
        hide_defaults(partial.kwargs.get("dag"))
        # Here with what default_args gave.
        kwargs = {name: hidden(v) if name == "spec" else v for name, v in partial.kwargs.items()}
        return HidingPartial(
            operator_class=partial.operator_class, kwargs=kwargs, params=partial.params
        )

    @classmethod
    def check_arguments(
        cls, arguments: Mapping[str, Any], literals: Literals, *, complete: bool
    ) -> None:
        """Raises InvalidInput for what is wrong with literal arguments. `complete`: False where more
        are to come, as in `.partial()`."""
        if complete or "spec" in arguments:
            literals.check_spec(arguments.get("spec"))
