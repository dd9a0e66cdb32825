"""An exception that no rule knows in; the group that its traceback points at, out."""

from __future__ import annotations

import re

from airflow_provider_vllm.diagnosis.events import Event

_PLACES = (
    ("network_auth", r"huggingface_hub/|requests/|urllib3/|httpx/|modelscope/hub"),
    (
        "communication",
        r"vllm/distributed/|torch/distributed/|device_communicators/|kv_transfer/|kv_connector/",
    ),
    (
        "kernel_hardware",
        r"_custom_ops\.py|triton/|flashinfer/|flash_attn|attention/backends|cutlass|/kernels/"
        r"|attention/ops|_ops\.py:__call__|deep_gemm|aiter/",
    ),
    ("environment", r"importlib/|torch/utils/cpp_extension|<frozen importlib|subprocess\.py"),
    (
        "model_config",
        r"model_loader/|load_weights|/configs?/|arg_utils|transformers/|tokenizer|/models/"
        r"|quantization/|config\.py|compilation/|_dynamo/|_inductor/|multimodal/|registry\.py",
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


def guess_group(event: Event) -> str:
    """One of GROUPS, by the message's own words, else by the innermost frames; "other" if neither."""
    for group, pattern in _KINDS:
        if re.search(pattern, event.message):
            return group
    for frame in reversed(event.frames[-12:]):
        for group, pattern in _PLACES:
            if re.search(pattern, frame):
                return group
    return "other"
