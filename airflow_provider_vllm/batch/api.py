"""The URLs that a batch can send to, and where each keeps its prompt and its answer.

Paths as vLLM 0.32 serves them. Adding an endpoint means adding it to every table here.
"""

from __future__ import annotations

from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
SCORE = "/v1/score"
RERANK = "/v1/rerank"
CLASSIFY = "/classify"
POOLING = "/pooling"
RESPONSES = "/v1/responses"

NAMES = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "embeddings": EMBEDDINGS,
    "score": SCORE,
    "rerank": RERANK,
    "classify": CLASSIFY,
    "pooling": POOLING,
    "responses": RESPONSES,
}
GENERATING = frozenset([CHAT, COMPLETIONS, RESPONSES])
URLS = tuple(NAMES.values())
PATHS = {
    **{url: url for url in URLS},
    "/score": SCORE,
    "/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/v1/classify": CLASSIFY,
    "/v1/pooling": POOLING,
}
ALIASES = {
    **PATHS,
    **NAMES,
    "chat/completions": CHAT,
    "chat_completions": CHAT,
    "embed": EMBEDDINGS,
}

# The field of the request that holds a single prompt.
PROMPT_FIELDS = {
    CHAT: "messages",
    COMPLETIONS: "prompt",
    EMBEDDINGS: "input",
    CLASSIFY: "input",
    POOLING: "input",
    RESPONSES: "input",
}
# Fields that may hold it instead; a list of chat messages among them.
OTHER_PROMPTS = {
    COMPLETIONS: ("prompt_embeds",),
    EMBEDDINGS: ("messages",),
    CLASSIFY: ("messages",),
    POOLING: ("messages", "data"),
    RESPONSES: ("prompt", "conversation"),
}
MESSAGES_TOO = frozenset([EMBEDDINGS, CLASSIFY, POOLING])
# OpenAI's; any other is the word of one model's chat template.
ROLES = frozenset(["assistant", "developer", "function", "system", "tool", "user"])
# Fields of the request that only make sense together; any one group will do.
PAIR_FIELDS = {
    SCORE: (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    ),
    RERANK: (("query", "documents"),),
}
LIST_FIELDS = frozenset(["documents", "items", "queries"])  # in CSV, JSON text
# The list in the answer.
ITEM_FIELDS = {
    CHAT: "choices",
    COMPLETIONS: "choices",
    EMBEDDINGS: "data",
    SCORE: "data",
    RERANK: "results",
    CLASSIFY: "data",
    POOLING: "data",
    RESPONSES: "output",
}
# The smallest request that makes the engine take a step.
PROBES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "1", "max_tokens": 1},
    EMBEDDINGS: {"input": "1"},
    SCORE: {"text_1": "1", "text_2": "1"},
    RERANK: {"query": "1", "documents": ["1"]},
    CLASSIFY: {"input": "1"},
    POOLING: {"input": "1"},
    RESPONSES: {"input": "1", "max_output_tokens": 16},
}


def url_of(asked: str) -> str | None:
    """The URL that a row's `url` means, or None. `vllm run-batch` looks at the end alone for two of them."""
    if (known := PATHS.get(asked)) is not None:
        return known
    ends = (("/score", SCORE), ("/rerank", RERANK))
    return next((url for end, url in ends if asked.endswith(end)), None)


# Why a choice ended before the model was done, with status 200 all the same: a server that is told to stop, sleep or
# pause sends what there is of each answer.
UNFINISHED = frozenset(["abort", "error"])
UNFINISHED_STATUS = frozenset(["cancelled", "failed", "in_progress", "queued"])  # of /v1/responses
MOST_TOKENS = 1 << 40  # of one answer; what says more is no count

NOT_READABLE = (KeyError, TypeError, AttributeError, StopIteration)


def answers_of(body: dict[str, Any]) -> list[Any]:
    """The answers in a response body of any of these URLs: texts, vectors, scores or labels.

    Several with `n` above 1. Raises one of `NOT_READABLE` for a body that is none.
    """
    if "choices" in body:
        return [
            item["message"].get("content") if "message" in item else item["text"]
            for item in body["choices"]
        ]
    if "output" in body:
        # Reasoning has a text as well, and is no answer.
        said = [item for item in body["output"] if item.get("type") == "message"]
        parts = [part for item in said for part in item.get("content") or ()]
        texts = [part.get("text") or "" for part in parts if part.get("type") == "output_text"]
        return ["".join(texts) if texts else None]
    if "results" in body:
        return [body["results"]]
    names = ("embedding", "score", "label", "data")
    return [item[next(name for name in names if name in item)] for item in body["data"]]


def answer_of(body: dict[str, Any]) -> Any:
    """The answer as one value: the only one, or the list of several; None where there is none."""
    try:
        found = answers_of(body)
    except NOT_READABLE:
        return None
    return found[0] if len(found) == 1 else found
