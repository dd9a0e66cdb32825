"""A rule's sentence and what its pattern found in; the sentence that people read, out.

`{name}` is a group of the pattern. `[... {name} ...]` is left out where one of the groups in it found
nothing, so that a sentence reads well without what its log does not tell; other brackets are plain.
A catalogue's test sees that whatever stands outside of such brackets is always found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

NAME = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]")


def filled(template: str, values: Mapping[str, str]) -> str:
    """The sentence with `values` in it; those that are empty count as not found."""
    return _put(_OPTIONAL.sub(lambda part: _if_known(part[1], values), template), values)


def always_needed(template: str) -> set[str]:
    """The groups without which the sentence cannot be said."""
    return set(NAME.findall(_OPTIONAL.sub("", template)))


def plain(template: str) -> str:
    """The sentence for a page about all logs: its groups in italics. Side by side are alternatives."""
    joined = re.sub(r"\]\[[^\w{]*", " or ", template)
    return NAME.sub(r"*\1*", _OPTIONAL.sub(r"\1", joined))


def _if_known(part: str, values: Mapping[str, str]) -> str:
    return _put(part, values) if all(values.get(name) for name in NAME.findall(part)) else ""


def _put(text: str, values: Mapping[str, str]) -> str:
    return NAME.sub(lambda name: values.get(name[1], ""), text)
