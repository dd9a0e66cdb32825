"""The body of a reply in, what is noted of it out, if it is a plain answer: most are, and cost half as much this way.

Invariant: what is found here is what the general reading (`answers.answer`) finds; anything else is left to that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from airflow_provider_vllm.batch.api import CHAT, COMPLETIONS, MOST_TOKENS

# Any other is looked at by the general reading: the server may have broken the answer off.
Finished = Literal["stop", "length", "tool_calls", "content_filter", "function_call", "repetition"]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class Usage(msgspec.Struct, gc=False, frozen=True):
    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0


class Message(msgspec.Struct, gc=False):
    content: str | None = None


class ChatChoice(msgspec.Struct, gc=False, kw_only=True):
    message: Message
    finish_reason: Finished | None = None


class TextChoice(msgspec.Struct, gc=False, kw_only=True):
    text: str
    finish_reason: Finished | None = None


class Answer(msgspec.Struct, gc=False):
    id: str | None = None
    usage: Usage = Usage()


class ChatAnswer(Answer, gc=False, kw_only=True):
    choices: Annotated[list[ChatChoice], msgspec.Meta(min_length=1)]


class TextAnswer(Answer, gc=False, kw_only=True):
    choices: Annotated[list[TextChoice], msgspec.Meta(min_length=1)]


DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    CHAT: msgspec.json.Decoder(ChatAnswer),
    COMPLETIONS: msgspec.json.Decoder(TextAnswer),
}


def plain_answer(url: str, raw: bytes) -> tuple[str | None, int, int, bool] | None:
    """Id, prompt and completion tokens of an answer on one line, whether it is cut off; None for what is not plain."""
    decoder = DECODERS.get(url)
    if decoder is None or raw.find(b"\n") >= 0:
        return None
    try:
        if not raw.isascii():
            raw.decode()  # what the decoder skips, it does not look at
        answer: ChatAnswer | TextAnswer = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    usage, cut_off = answer.usage, False
    for choice in answer.choices:
        cut_off = cut_off or choice.finish_reason == "length"
    return answer.id, usage.prompt_tokens, usage.completion_tokens, cut_off
