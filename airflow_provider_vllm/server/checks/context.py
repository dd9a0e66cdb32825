"""The longest request that a model takes by its own config.json, against max_model_len.

vLLM 0.32 refuses a larger max_model_len (vllm/config/model.py), unless VLLM_ALLOW_LONG_MAX_MODEL_LEN
is set. What stretches a context (rope scaling, overrides, other formats of the config) gives no limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from airflow_provider_vllm.server.checks.finding import Finding, error
from airflow_provider_vllm.server.checks.model import PLAIN_DECODERS, Model
from airflow_provider_vllm.server.checks.options import Options

# Rope types that leave max_position_embeddings as it is.
_UNSCALED = ("default", "llama3")
_ALLOW = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def own_limit(model: Model, options: Options) -> int | None:
    """Tokens that max_model_len may be at most; None where that is not certain."""
    config = model.text_config
    limit = config.get("max_position_embeddings")
    if config.get("model_type") not in PLAIN_DECODERS or type(limit) is not int or limit < 1:
        return None
    if options.get("hf_overrides") or options.get("config_format", "auto") not in ("auto", "hf"):
        return None
    if (model.folder / "params.json").exists():
        return None  # Mistral's own format may be read instead
    parts = (config, model.config or {})
    if any(part.get("model_max_length") is not None for part in parts):
        return None
    ropes = [part.get(name) for part in parts for name in ("rope_scaling", "rope_parameters")]
    return limit if all(map(_is_unscaled, ropes)) else None


def findings(model: Model, options: Options, environ: Mapping[str, str]) -> Iterator[Finding]:
    limit, asked = own_limit(model, options), options.size("max_model_len")
    if limit is None or asked is None or asked <= limit or environ.get(_ALLOW, "0") != "0":
        return
    message = f"max_model_len is {asked}, and the model takes at most {limit} tokens (config.json)."
    yield error("max-model-len", message, f"Set `max_model_len` to {limit} or less.")


def _is_unscaled(rope: Any) -> bool:
    if not rope:
        return rope is None
    return isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in _UNSCALED
