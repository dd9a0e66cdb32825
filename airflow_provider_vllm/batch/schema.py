"""An output schema in, a check of answer texts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from airflow_provider_vllm.batch.spec import schema_of
from airflow_provider_vllm.exceptions import InvalidInput


def checker(output_schema: Any) -> Callable[[str], str | None] | None:
    """A function from answer text to what is wrong with it (None: nothing); None without a schema.

    A Pydantic class checks with itself, a JSON schema with the jsonschema package. Raises InvalidInput for a schema
    that is not one.
    """
    if output_schema is None:
        return None
    validate = getattr(output_schema, "model_validate_json", None)
    if validate is not None:
        return lambda text: _first_line(validate, text)
    from jsonschema import SchemaError, validators  # type: ignore[import-untyped]
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = schema_of(output_schema)
    kind = validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise InvalidInput(f"output_schema is not a JSON schema: {error.message}") from error
    validator = kind(schema, registry=Registry())  # nothing is fetched
    for ref in _refs(schema):
        try:
            next(validator.evolve(schema={"$ref": ref}).iter_errors(None), None)
        except (Unresolvable, RecursionError) as error:
            raise InvalidInput(
                f"output_schema: $ref {ref} leads nowhere; put what it names into the schema itself, "
                "under $defs"
            ) from error

    def check(text: str) -> str | None:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return f"the answer is not JSON: {error}"
        wrong = next(validator.iter_errors(value), None)
        return None if wrong is None else f"{wrong.json_path}: {wrong.message[:300]}"

    return check


def _refs(schema: Any) -> Iterator[str]:
    """Every `$ref` in a schema; example values are no schemas."""
    if isinstance(schema, list):
        for each in schema:
            yield from _refs(each)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name == "$ref" and isinstance(value, str):
                yield value
            elif name not in ("const", "enum", "default", "examples"):
                yield from _refs(value)


def _first_line(validate: Callable[[str], Any], text: str) -> str | None:
    try:
        validate(text)
    except ValueError as error:  # pydantic's ValidationError is one
        return " ".join(str(error).split())[:400]
    return None
