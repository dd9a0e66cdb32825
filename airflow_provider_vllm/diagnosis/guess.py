"""An exception that no rule knows in; the group that its traceback points at, out."""

from __future__ import annotations

import re

from airflow_provider_vllm.diagnosis.events import Event

_PLACES = (
    ("network_auth", r"huggingface_hub/|^requests/|urllib3/|httpx/|modelscope/hub|hf_transfer"),
    (
        "communication",
        r"vllm/distributed/|torch/distributed/|device_communicators/|kv_transfer/|kv_connector/"
        r"|ray/experimental/channel|^(?:nixl|lmcache|mooncake)/",
    ),
    (
        "request",
        r"vllm/lora/|multimodal/|mm_preprocess|transformers_utils/processors|vllm/renderers/"
        r"|sampling_params|vllm/inputs/|input_processor|v1/engine/processor|vllm/parser/"
        r"|entrypoints/(?:openai|pooling|generate)/|tool_parsers/|structured_output/",
    ),
    (
        "kernel_hardware",
        r"_custom_ops\.py|triton/|flashinfer/|flash_attn|/attention/|cutlass|/kernels/|/ops/"
        r"|_ops\.py:__call__|deep_gemm|aiter|fused_moe/|/mamba/|torch/cuda/|device_allocator/",
    ),
    (
        "environment",
        r"importlib/|torch/utils/cpp_extension|<frozen importlib|subprocess\.py|vllm/platforms/",
    ),
    (
        "model_config",
        r"model_loader/|load_weights|/configs?/|arg_utils|transformers/|tokenizer|/models/"
        r"|quantization/|config\.py|compilation/|_dynamo/|_inductor/|registry\.py|model_executor/"
        r"|vllm/models/|spec_decode/",
    ),
)
_KINDS = (
    (
        "environment",
        r"^(?:ModuleNotFoundError|ImportError|PermissionError|OSError|FileNotFoundError)",
    ),
    ("kernel_hardware", r"CUDA|HIP|cuda|Triton|triton|kernel|NVRTC|ptxas"),
    ("communication", r"NCCL|Gloo|gloo|RPC|socket|Connection|timed? ?out"),
    ("capacity", r"[Oo]ut of memory|MemoryError"),
)
FRAMES = 12
"""So many of the innermost frames count."""


def guess_group(event: Event, serving: bool) -> str:
    """One of GROUPS, by the message's own words, else by the innermost frames; "other" if neither.

    A request can only be to blame where the server was `serving`: before, its code runs with dummies.
    Model and launch options can only be to blame before.
    """
    for group, pattern in _KINDS:
        if re.search(pattern, event.message):
            return group
    for frame in reversed(event.frames[-FRAMES:]):
        for group, pattern in _PLACES:
            if re.search(pattern, frame):
                return _in_time(group, serving)
    return "other"


def _in_time(group: str, serving: bool) -> str:
    if group == "request" and not serving:
        return "model_config"
    return "other" if group == "model_config" and serving else group
