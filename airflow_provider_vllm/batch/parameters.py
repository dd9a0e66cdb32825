"""Bodies of requests in, a word in the log about fields that the server would ignore without one.

vLLM takes any field and drops those that it does not know. Names are those of the request classes of vLLM 0.32
(a test compares them) and of OpenAI's reference. Invariants: nothing fails here; each field is named once a batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_provider_vllm import names
from airflow_provider_vllm.batch.api import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
)
from airflow_provider_vllm.exceptions import InvalidInput

EVERY = "cache_salt model priority request_id user "
GENERATE = EVERY + (
    "ec_transfer_params frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params logit_bias min_p "
    "mm_payload presence_penalty repetition_penalty return_mm_kwargs seed session_id skip_special_tokens stop "
    "stop_token_ids stream stream_options structured_outputs temperature top_k top_p vllm_xargs watermarking "
)
COMPLETE = GENERATE + (
    "add_special_tokens allowed_token_ids bad_words echo length_penalty logprob_token_ids logprobs max_tokens "
    "min_tokens n prompt_logprobs repetition_detection response_format return_token_ids return_token_offsets "
    "return_tokens_as_token_ids routed_experts_prompt_start spaces_between_special_tokens stream_interval "
    "thinking_token_budget truncate_prompt_tokens truncation_side use_beam_search "
)
TALK = (
    "chat_template_kwargs include_reasoning media_io_kwargs metadata mm_processor_kwargs moderation "
    "parallel_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
    "service_tier store tool_choice tools top_logprobs "
)
POOL = EVERY + (
    "add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message input "
    "media_io_kwargs messages mm_processor_kwargs padding truncate_prompt_tokens truncation_side use_activation "
)
EMBED = POOL + "dimensions embed_dtype encoding_format endianness "
RANK = EVERY + (
    "chat_template_kwargs documents instruction max_tokens_per_doc max_tokens_per_query mm_processor_kwargs padding "
    "truncate_prompt_tokens truncation_side use_activation "
)
NAMES = {
    CHAT: COMPLETE + TALK + (
        "add_generation_prompt audio chat_template continue_final_message documents function_call functions "
        "max_completion_tokens messages modalities prediction reasoning_effort return_prompt_text verbosity "
        "web_search_options"
    ),
    COMPLETIONS: COMPLETE + "best_of prompt prompt_embeds suffix",
    RESPONSES: GENERATE + TALK + (
        "access_programs background background_options context_management conversation enable_response_messages "
        "image include input instructions max_output_tokens max_tool_calls previous_input_messages "
        "previous_response_id prompt reasoning text truncation"
    ),
    EMBEDDINGS: EMBED,
    POOLING: EMBED + "data task",
    CLASSIFY: POOL,
    SCORE: RANK + "data_1 data_2 items queries text_1 text_2",
    RERANK: RANK + "query top_n",
}  # fmt: skip
KNOWN = {url: frozenset(text.split()) for url, text in NAMES.items()}
# What other servers, and older vLLMs, call a thing.
ELSEWHERE = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_tokens",),
    "stop_sequences": ("stop",),
    "guided_json": ("structured_outputs",),
    "guided_regex": ("structured_outputs",),
    "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",),
}
# What every server refuses in every row, where all rows are given it: the least, and the most.
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, math.inf),
    "n": (1, math.inf),
    "max_tokens": (0, math.inf),
    "max_completion_tokens": (0, math.inf),
    "max_output_tokens": (0, math.inf),
    "min_tokens": (0, math.inf),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, math.inf),
}
MOST_SETS = 1000  # of different fields that are looked at: a body may have fields named at random


def check_values(params: Mapping[str, Any]) -> None:
    """Raises InvalidInput for a parameter of all rows that is no number, or one that no server takes."""
    for name, (least, most) in NUMBERS.items():
        value = params.get(name)
        if value is None:
            continue
        try:
            number = math.nan if isinstance(value, bool) else float(value)  # servers take text, too
        except (TypeError, ValueError):
            number = math.nan
        if not least <= number <= most:
            up_to = f" to {most:g}" if most < math.inf else ""
            raise InvalidInput(
                f"{name} is {value!r} for every row; use a number from {least:g}{up_to}"
            )


def check_names(url: str, params: Iterable[str]) -> None:
    """Raises InvalidInput for a parameter of all rows that vLLM would ignore, where another was meant."""
    for name in params:
        if name not in KNOWN[url] and (meant := names.nearest(name, KNOWN[url])) is not None:
            raise InvalidInput(
                f"{url} has no parameter {name!r}, which vLLM would ignore without a word; did you mean {meant!r}?"
            )


class Spelling:
    """Looks at the fields of every body; a set of them that was seen before costs one look-up."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._seen: set[tuple[str, ...]] = set()
        self._said: set[str] = set()

    def look(self, url: str, body: Iterable[str], row: int) -> None:
        """Say once what is wrong with each of these fields; `row` counts from 0."""
        fields = (url, *body)
        if fields in self._seen or len(self._seen) >= MOST_SETS:
            return
        self._seen.add(fields)
        for name in fields[1:]:
            if name not in KNOWN[url] and name not in self._said:
                self._said.add(name)
                self._say(url, name, row + 1)

    def _say(self, url: str, name: str, row: int) -> None:
        if name == "extra_body":
            self._log.warning(
                "Row %d, as the first: extra_body is a word of the openai client and is ignored by servers; "
                "put its fields beside it",
                row,
            )
        elif (meant := nearest(url, name)) is not None:
            self._log.warning(
                "Row %d, as the first: %s has no field %r, which servers ignore; %r was meant, perhaps",
                row,
                url,
                name,
                meant,
            )
        else:
            self._log.info(
                "Row %d, as the first: %s has no field %r known here; vLLM ignores what it does not know",
                row,
                url,
                name,
            )


def nearest(url: str, name: str) -> str | None:
    """The field of this endpoint that a name most likely means; None where it is like none of them."""
    for other in ELSEWHERE.get(name, ()):
        if other in KNOWN[url]:
            return other
    return names.nearest(name, KNOWN[url])
