"""The end of a request without an answer in, what it means for its row out. Pure, and light to import."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import orjson

from airflow_provider_vllm.exceptions import BatchFailed


class Kind(Enum):
    """What a failed request means for its row."""

    UNSENT = "never reached the server"
    DOUBTFUL = "the server may be dead"
    BUSY = "the server asks to wait"
    TIMEOUT = "no answer in time"
    REJECTED = "the request is wrong"
    FATAL = "no request can work"


class Reply(NamedTuple):
    """The end of one request: `status` and `body`, or, without a status, the `fault` and its `message`."""

    tag: Any
    status: int
    body: bytes = b""
    fault: Kind | None = None
    message: str = ""
    retry_after: float = 0.0


WRONG_ANYWAY = (501, 505)  # of the server's errors those that no time mends


def classify(reply: Reply) -> Kind:
    """Why a reply without status 200 came, as far as it alone can say."""
    status = reply.status
    if reply.fault is not None:
        return reply.fault
    if status in (401, 403) or 300 <= status < 400:
        return Kind.FATAL
    if status in (408, 425, 429):
        return Kind.BUSY
    return Kind.REJECTED if 400 <= status < 500 or status in WRONG_ANYWAY else Kind.DOUBTFUL


def server_message(reply: Reply) -> str:
    """The server's own words, at most 500 characters."""
    if reply.fault is not None:
        return reply.message or reply.fault.value
    try:
        body = orjson.loads(reply.body)
        found = body.get("error", body)
        text = found.get("message") if isinstance(found, dict) else found
        text = text or body.get("detail") or reply.body.decode("utf-8", "replace")
    except (orjson.JSONDecodeError, AttributeError):
        text = reply.body.decode("utf-8", "replace")
    return f"HTTP {reply.status}: {str(text)[:500]}"


def fatal(reply: Reply, message: str) -> BatchFailed:
    """Why no request can work."""
    if reply.fault is not None:
        return BatchFailed(
            f"the server cannot be spoken to: {message}; check its URL, certificate and proxy"
        )
    if reply.status < 400:
        return BatchFailed(
            f"the server redirects, and a request is not sent to a place that nobody named: {message}; give the "
            "connection the URL where it answers"
        )
    return BatchFailed(f"the server refuses the key: {message}; check the connection's password")
