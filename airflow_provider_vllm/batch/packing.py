"""Several rows of equal parameters in, one request out; its one answer in, the answers of the rows out.

A pack's `usage` is a sum, so a packed row's own body has `usage: null`; the sum goes into the manifest. Invariant:
only rows whose answers do not depend on travelling together are packed (no tools, no `n`, no streaming).
"""

from __future__ import annotations

import orjson

from airflow_provider_vllm.batch.answers import NotAnAnswer
from airflow_provider_vllm.batch.rows import BODY_FIELDS, EMBEDDINGS, PACKABLE, Row


def join(rows: list[Row]) -> tuple[str, bytes]:
    """URL and body of one request for rows with equal `url` and `params`."""
    first = rows[0]
    name = BODY_FIELDS[first.url].encode()
    prompts = orjson.dumps([row.prompt for row in rows])
    assert first.params is not None
    comma = b"," if len(first.params) > 2 else b""
    return PACKABLE[first.url], first.params[:-1] + comma + b'"%b":%b}' % (name, prompts)


def split(rows: list[Row], raw: bytes) -> tuple[list[bytes], int, int]:
    """One body a row, in their order, and the prompt and completion tokens of all. Raises NotAnAnswer."""
    name = "data" if rows[0].url == EMBEDDINGS else "choices"
    try:
        body = orjson.loads(raw)
        items = sorted(body.pop(name), key=lambda item: item["index"])
        usage = body.get("usage") or {}
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
        bodies.append(orjson.dumps(own))
    return bodies, usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
