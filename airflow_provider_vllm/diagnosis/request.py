"""Rules: one request, or an adapter, not the server as such."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from airflow_provider_vllm.diagnosis.rule import Rule

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def lora_rank(match: re.Match[str], _: Sequence[str]) -> dict[str, Any] | None:
    """The smallest rank that vLLM allows and that holds the adapter's."""
    rank = next((allowed for allowed in _RANKS if allowed >= int(match["rank"])), None)
    return {"max_lora_rank": rank} if rank else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="lora_rank_exceeds_max",
        group="request",
        pattern=r"LoRA rank (?P<rank>\d+) is greater than max_lora_rank (?P<limit>\d+)",
        explanation="The LoRA adapter's rank is {rank}, the server allows {limit}.",
        first_action="Set max_lora_rank to at least {rank}.",
        launch=False,
        request=False,
        remedy=lora_rank,
        examples=(
            "(Worker pid=19325) ERROR 11-30 09:57:57 [multiproc_executor.py:1063] ValueError: LoRA rank 64 is greater than max_lora_rank 8.",
        ),
    ),
    Rule(
        id="lora_adapter_not_found",
        group="request",
        pattern=r"Loading lora (?P<name>\S+) failed|No adapter found for (?P<path>\S+)|adapter_config\.json.{0,60}(?:not exist|No such file|not found)",
        explanation="There is no LoRA adapter where the server was told to look.",
        first_action="Check the adapter's path: it must hold adapter_config.json and its weights.",
        launch=False,
        request=False,
        examples=(
            "vllm.exceptions.LoRAAdapterNotFoundError: Loading lora mine failed: No adapter found for /data/adapters/mine",
        ),
    ),
    Rule(
        id="lora_not_enabled",
        group="request",
        pattern=r"LoRA is not enabled|lora_request .{0,60}not enabled|does not support LoRA|target modules .{0,200}(?:not supported|unsupported|unexpected)|is unsupported LoRA weight|unexpected modules in",
        explanation="The server, or this model in vLLM, takes no such LoRA adapter.",
        first_action="Start with enable_lora, and an adapter whose target modules the model supports.",
        launch=False,
        request=False,
        confidence=0.9,
        examples=(
            "ValueError: Got lora_request LoRARequest(lora_name='a') but LoRA is not enabled!",
        ),
    ),
    Rule(
        id="encoder_cache_too_small",
        group="request",
        pattern=r"item with (?P<size>\d+) embedding tokens, which exceeds the pre-allocated encoder cache size (?P<cache>\d+)|exceeds the (?:pre-allocated )?encoder cache size",
        explanation="One image, video or audio of a request is larger than the encoder cache[ ({size} tokens for {cache})].",
        first_action="Send smaller media, or raise max_num_batched_tokens[ to at least {size}].",
        launch=False,
        request=False,
        remedy=lambda match, messages: (
            {"max_num_batched_tokens": int(match["size"])} if match["size"] else None
        ),
        examples=(
            "ValueError: The decoder prompt contains a(n) image item with 16384 embedding tokens, which exceeds the pre-allocated encoder cache size 8192. Please reduce the input size or increase the encoder cache size by setting --limit-mm-per-prompt at startup.",
        ),
    ),
    Rule(
        id="multimodal_mismatch",
        group="request",
        pattern=r"Encoder cache miss for|Attempted to assign .{1,120} tokens to \d+ placeholders|multimodal embeddings .{0,60}placeholders",
        explanation="The images, video or audio of a request did not become as many tokens as the prompt has places for.",
        first_action="Leave that request out and check its media and placeholders; upgrade vLLM, since this should not end the engine.",
        launch=True,
        request=False,
        confidence=0.85,
        examples=(
            "(EngineCore pid=7) ERROR 03-16 12:28:39 [core.py:340] AssertionError: Encoder cache miss for 8f3a.",
            "ERROR 03-16 12:28:39 [core.py:340] ValueError: Attempted to assign 256 + 74 = 330 multimodal tokens to 332 placeholders",
        ),
    ),
    Rule(
        id="prompt_too_long",
        group="request",
        pattern=r"This model's maximum context length is (?P<limit>\d+) tokens|prompt \(length (?P<length>\d+)\) is longer than the maximum model length of (?P<model>\d+)|[Ii]nput (?:prompt|length).{0,40}exceeds.{0,40}(?:max_model_len|limit|maximum)|max_tokens must be at least 1, got -",
        explanation="A request is longer than the context window.",
        first_action="Shorten the prompt or max_tokens, or start with a larger max_model_len.",
        launch=False,
        request=False,
        examples=(
            "ValueError: The decoder prompt (length 5031) is longer than the maximum model length of 4096. Make sure that `max_model_len` is no smaller than the number of text tokens.",
        ),
    ),
    Rule(
        id="chat_template_missing",
        group="request",
        pattern=r"default chat template is no longer allowed|does not define a (?:default )?chat template|chat_template is not set|no chat template",
        explanation="The model's tokenizer has no chat template.",
        first_action="Give chat_template, or send completions instead of chat messages.",
        launch=False,
        request=False,
        examples=(
            "ValueError: As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the tokenizer does not define one.",
        ),
    ),
    Rule(
        id="grammar_failed",
        group="request",
        pattern=r"^(?!\S*(?:ImportError|ModuleNotFoundError))[^\n]*(?:xgrammar.*(?:[Ee]rror|[Ff]ail)|GrammarMatcher|[Ii]nvalid (?:grammar|json schema|regex)|grammar_(?:compiler|functor|parser)\.cc|(?:outlines|guidance|llguidance).*(?:[Ee]rror|[Ff]ail)|Unsupported JSON schema|JSONSchema|regex_converter|[Rr]egex parsing error|EBNF parse)",
        explanation="The grammar or JSON schema of a request could not be compiled or followed.",
        first_action="Leave that schema out, or start with another structured-output backend.",
        launch=True,
        request=False,
        native=False,
        confidence=0.8,
        examples=(
            "ERROR 05-23 09:31:47 [core.py:396] RuntimeError: [10:00:00] /project/cpp/grammar_compiler.cc:100: Check failed",
        ),
    ),
)
