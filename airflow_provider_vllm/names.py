"""Names in messages: one that nobody knows goes in, what was probably meant comes out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from airflow_provider_vllm.exceptions import InvalidInput

# Below this likeness a suggestion misleads: options of vLLM are no misspelt fields of ours.
_ALIKE = 0.75


def nearest(name: object, known: Collection[str]) -> str | None:
    """The one of `known` that `name` probably is; None where none is like it."""
    import difflib  # only where something is wrong: DAG files are parsed often

    plain = str(name).lower().replace("-", "_")
    found = difflib.get_close_matches(plain, known, n=1, cutoff=_ALIKE)
    return found[0] if found else None


def type_of(value: Any) -> str:
    """The type of a value with its article: `an int`, `a list`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def refuse_misplaced(arguments: Iterable[str], places: Mapping[str, str]) -> None:
    """Raises InvalidInput for the first argument that `places` says how to write elsewhere."""
    for name in arguments:
        if name in places:
            raise InvalidInput(f"there is no argument {name!r}: write {places[name]}.")
