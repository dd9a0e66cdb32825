"""A line of an OpenAI batch file in, its parts out, if it is a plain request: most are, and cost half as much this way.

Invariants: what is read here, the general reading (`rows.RowMaker`) takes for a good row, too, with the same name, URL
and values of the body; anything else is left to that. Whether a line is plain depends on the line alone, so that a row
has one key.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from airflow_provider_vllm.batch.api import CHAT, COMPLETIONS

MOST = 1 << 62
Text = Annotated[str, msgspec.Meta(min_length=1)]
Role = Literal["assistant", "developer", "system", "user"]
# A larger one would be read as a float.
Integer = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
Count = Integer | UnsetType
Number = Integer | float | UnsetType


class Message(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    role: Role
    content: str


class Body(msgspec.Struct, gc=False, forbid_unknown_fields=True, kw_only=True):
    """What most requests have; what is not there is not sent, and null is not plain."""

    model: str
    max_tokens: Count = UNSET
    temperature: Number = UNSET
    top_p: Number = UNSET
    top_k: Count = UNSET
    min_p: Number = UNSET
    n: Count = UNSET
    seed: Count = UNSET
    stop: str | list[str] | UnsetType = UNSET
    frequency_penalty: Number = UNSET
    presence_penalty: Number = UNSET
    repetition_penalty: Number = UNSET
    user: str | UnsetType = UNSET


class ChatBody(Body, gc=False, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count = UNSET


class TextBody(Body, gc=False, forbid_unknown_fields=True, kw_only=True):
    prompt: Text


class ChatRow(msgspec.Struct, gc=False, forbid_unknown_fields=True, tag_field="url", tag=CHAT):
    custom_id: Text
    body: ChatBody
    method: Literal["POST"] = "POST"
    goes_to: ClassVar[str] = CHAT


class TextRow(
    msgspec.Struct, gc=False, forbid_unknown_fields=True, tag_field="url", tag=COMPLETIONS
):
    custom_id: Text
    body: TextBody
    method: Literal["POST"] = "POST"
    goes_to: ClassVar[str] = COMPLETIONS


decode = msgspec.json.Decoder(ChatRow | TextRow).decode
encode = msgspec.json.Encoder().encode


def plain_row(line: bytes) -> tuple[str, str, bytes] | None:
    """Custom id, URL and body of a plain request on one line; None for any other."""
    try:
        row = decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return row.custom_id, row.goes_to, encode(row.body)
