"""Several rows of equal parameters in, one request out; its one answer in, the answers of the rows out.

A pack's `usage` is a sum, so a packed row's own body has `usage: null`; the sum goes into the manifest. Invariant:
only rows whose answers do not depend on travelling together are packed (no tools, no `n`, no streaming).
"""

from __future__ import annotations

from typing import Any

import orjson

from airflow_provider_vllm.batch.answers import NotAnAnswer, tokens_of
from airflow_provider_vllm.batch.api import CHAT, COMPLETIONS, EMBEDDINGS, PROMPT_FIELDS
from airflow_provider_vllm.batch.reply import Reply
from airflow_provider_vllm.batch.row import Row

CHAT_BATCH = "/v1/chat/completions/batch"
PACKABLE = {CHAT: CHAT_BATCH, COMPLETIONS: COMPLETIONS, EMBEDDINGS: EMBEDDINGS}
SHORT = 64  # tokens
# What vLLM's chat batch endpoint knows; it would drop any other field without a word.
CHAT_FIELDS = frozenset(
    [
        "model",
        "messages",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "max_tokens",
        "max_completion_tokens",
        "response_format",
        "seed",
        "stop",
        "temperature",
        "top_p",
        "user",
        "top_k",
        "min_p",
        "repetition_penalty",
        "chat_template_kwargs",
    ]
)
# What ties an answer to its place in a request.
ALONE = frozenset(
    [
        "n",
        "best_of",
        "stream",
        "stream_options",
        "use_beam_search",
        "request_id",
        "echo",
        "prompt_embeds",
    ]
)


def prepare(row: Row, body: dict[str, Any]) -> None:
    """Note on a row what it shares with others (`params`) and what is its own (`prompt`), where it may be packed."""
    if row.url not in PACKABLE or not ALONE.isdisjoint(body):
        return
    if row.url == CHAT and not CHAT_FIELDS.issuperset(body):
        return
    name = PROMPT_FIELDS[row.url]
    prompt = body.get(name)
    if row.url != CHAT and not isinstance(prompt, str):
        return
    rest = {key: value for key, value in body.items() if key != name}
    row.prompt, row.params = prompt, orjson.dumps(rest, option=orjson.OPT_SERIALIZE_NUMPY)


def is_short(row: Row) -> bool:
    """Whether a row is answered so fast that the HTTP server, and not the engine, is the bottleneck."""
    if row.params is None:
        return False
    params = orjson.loads(row.params)
    limit = params.get("max_completion_tokens") or params.get("max_tokens")
    return row.url == EMBEDDINGS or (isinstance(limit, int) and limit <= SHORT)


def not_offered(reply: Reply, url: str) -> bool:
    """Whether a refused pack says that the server has no such endpoint, and not no such model."""
    elsewhere = 300 <= reply.status < 400  # a gateway that knows some paths only
    missing = elsewhere or reply.status in (403, 404, 405, 501)
    missing = missing and b"model" not in reply.body.lower()
    return missing and url != PACKABLE[url]


def join(rows: list[Row]) -> tuple[str, bytes]:
    """URL and body of one request for rows with equal `url` and `params`."""
    first = rows[0]
    name = PROMPT_FIELDS[first.url].encode()
    prompts = orjson.dumps([row.prompt for row in rows], option=orjson.OPT_SERIALIZE_NUMPY)
    assert first.params is not None
    comma = b"," if len(first.params) > 2 else b""
    return PACKABLE[first.url], first.params[:-1] + comma + b'"%b":%b}' % (name, prompts)


def split(rows: list[Row], raw: bytes) -> tuple[list[bytes], int, int]:
    """One body a row, in their order, and the prompt and completion tokens of all. Raises NotAnAnswer."""
    name = "data" if rows[0].url == EMBEDDINGS else "choices"
    try:
        body = orjson.loads(raw)
        items = sorted(body.pop(name), key=lambda item: item["index"])
        tokens = tokens_of(body)
        if [item["index"] for item in items] != list(range(len(rows))):
            raise NotAnAnswer("the pack's answer does not have one item a row")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise NotAnAnswer(f"the pack's answer cannot be read: {error}") from None
    bodies = []
    for index, item in enumerate(items):
        own = {
            **body,
            "id": f"{body.get('id')}-{index}",
            name: [{**item, "index": 0}],
            "usage": None,
        }
        try:
            bodies.append(orjson.dumps(own))
        except TypeError as error:  # it is read to a greater depth than it is written
            raise NotAnAnswer(f"the pack's answer cannot be written down: {error}") from None
    return bodies, *tokens
