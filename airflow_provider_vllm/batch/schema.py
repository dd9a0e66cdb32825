"""An output schema in, a check of answer texts out.

Invariants: a schema that can check nothing is refused when the check is made, before any server is started; a check
raises nothing, and ends within seconds, whatever the answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from airflow_provider_vllm.batch.answers import Check
from airflow_provider_vllm.batch.spec import schema_of
from airflow_provider_vllm.exceptions import InvalidInput

PATTERN_S = 1.0  # of one pattern on one text: some take longer than the universe, and `re` cannot be interrupted
REFERENCES = ("$ref", "$dynamicRef")
# Keywords whose value has schemas under names of the user's own, and those whose value is no schema.
NAMED = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)
DATA = ("const", "enum", "default", "examples")


def checker(output_schema: Any) -> Check | None:
    """A function from answer text to what is wrong with it (None: nothing); None without a schema.

    A Pydantic class checks with itself, a JSON schema with the jsonschema package. Raises InvalidInput for a schema
    that is not one.
    """
    if output_schema is None:
        return None
    validate = getattr(output_schema, "model_validate_json", None)
    check = _json_check(output_schema) if validate is None else _pydantic_check(validate)

    def never_raises(text: str) -> str | None:
        try:
            return check(text)
        except (
            Exception
        ) as error:  # a validator of the user's own, or an answer that is nested too deep
            return f"output_schema could not be checked: {type(error).__name__}: {str(error)[:300]}"

    return never_raises


def _pydantic_check(validate: Callable[[str], Any]) -> Check:
    def check(text: str) -> str | None:
        try:
            validate(text)
        except ValueError as error:  # pydantic's ValidationError is one
            return " ".join(str(error).split())[:400]
        return None

    return check


def _json_check(output_schema: Any) -> Check:
    validator = _validator(schema_of(output_schema))

    def check(text: str) -> str | None:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return f"the answer is not JSON: {error}"
        wrong = next(validator.iter_errors(value), None)
        return None if wrong is None else f"{wrong.json_path}: {wrong.message[:300]}"

    return check


def _validator(schema: Any) -> Any:
    from jsonschema import SchemaError, validators  # type: ignore[import-untyped]
    from referencing import Registry

    try:
        kind = validators.validator_for(schema)
        kind.check_schema(schema)
        kind = validators.extend(kind, {"pattern": _pattern})
        validator = kind(schema, registry=Registry())  # nothing is fetched
        references = list(_references(schema, ()))
    except SchemaError as error:
        raise InvalidInput(f"output_schema is not a JSON schema: {error.message}") from error
    except Exception as error:  # it is nested too deep, or its `$schema` is no text
        raise InvalidInput(
            f"output_schema is not a JSON schema: {type(error).__name__}: {error}"
        ) from error
    for ref, alone in references:
        try:
            for _ in validator.evolve(schema=alone).iter_errors(None):
                pass
        except Exception as error:  # unresolvable, or without an end
            raise InvalidInput(
                f"output_schema: {ref} leads nowhere; put what it names into the schema itself, "
                "under $defs"
            ) from error
    return validator


def _pattern(validator: Any, pattern: str, text: Any, schema: Any) -> Iterator[Any]:
    """The keyword `pattern`, as jsonschema has it, but with an end."""
    import regex  # type: ignore[import-untyped]
    from jsonschema import ValidationError

    if not isinstance(text, str):
        return
    try:
        if not regex.search(pattern, text, timeout=PATTERN_S):
            yield ValidationError(f"{text!r} does not match {pattern!r}")
    except TimeoutError:
        yield ValidationError(
            f"the pattern {pattern!r} finds no end on {text[:50]!r}...: write it without repetitions of repetitions"
        )


def _references(schema: Any, ids: tuple[tuple[str, Any], ...]) -> Iterator[tuple[str, Any]]:
    """Every reference in a schema, and a schema of it alone; `ids` are what it is relative to."""
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each, ids)
    if not isinstance(schema, dict):
        return
    ids = (*ids, *((name, schema[name]) for name in ("$id", "id") if name in schema))
    for name, value in schema.items():
        if name in REFERENCES:
            yield f"{name} {value}", _alone({name: value}, ids)
        elif name in NAMED and isinstance(value, dict):
            yield from _references(list(value.values()), ids)
        elif name not in DATA:
            yield from _references(value, ids)


def _alone(reference: dict[str, Any], ids: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """An id counts for what is below it, and not beside a `$ref` in the older drafts."""
    for name, value in reversed(ids):
        reference = {name: value, "allOf": [reference]}
    return {"allOf": [reference]}
