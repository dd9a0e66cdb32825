"""Whether the model fits: lower bounds of what vLLM will need, against what is free.

Everything here is arithmetic on what was read before. A bound leaves out what it does not know
(activations, CUDA graphs, the driver's context), so that a finding of level "error" is a start that
fails for certain, minutes later, after the weights were loaded. What cannot be bounded gives none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow_provider_vllm.server.checks import context
from airflow_provider_vllm.server.checks.finding import Finding, error, warning
from airflow_provider_vllm.server.checks.model import PLAIN_DECODERS, Model
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.gpus import Gpu, describe_process
from airflow_provider_vllm.server.sizes import GIB, gib

_FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_WIDE = ("float32", "float")
# --quantization that makes 16-bit weights smaller while they are loaded: bytes an element at least.
_ONLINE = {"fp8": 1.0, "experts_int8": 1.0, "bitsandbytes": 0.5}
# Options that change which weights are loaded, or their shape: no bound then.
_UNBOUNDED = ("hf_overrides", "language_model_only", "mm_encoder_only", "cpu_offload_params")
_SPLIT_CONTEXT = ("decode_context_parallel_size", "prefill_context_parallel_size")
_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")


def weight_bytes(model: Model, options: Options) -> int | None:
    """Bytes that the weights need at least in memory, on all workers of one replica together.

    None where that is not known: other formats than safetensors, an unknown quantization, options
    that leave a part of the model out.
    """
    config = model.config or {}
    if not model.tensors or any(options.get(name) for name in _UNBOUNDED):
        return None
    quantized = "quantization_config" in config or "compression_config" in config
    method = options.get("quantization")
    if method and not quantized and method not in _ONLINE:
        return None
    width = 4 if options.get("dtype") in _WIDE else 2
    online = None if quantized or not method else _ONLINE[method]
    layers = model.text_config.get("num_hidden_layers")
    total = 0.0
    for name, tensor in model.tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue  # the embedding's weights are used
        match = _LAYER.match(name)
        if match and isinstance(layers, int) and int(match[1]) >= layers:
            continue  # layers for speculative decoding, left out by default
        own = _FLOATS.get(tensor.dtype)
        if own is None:
            total += tensor.size
        elif quantized:
            total += tensor.elements * min(own, width)
        else:
            total += tensor.elements * (online or width)
    return int(total)


def kv_bytes_per_token(model: Model, options: Options) -> int | None:
    """Bytes of KV cache for one token in each worker; None for anything but a plain decoder.

    Two (key, value) x layers of this worker x its KV heads x head size x bytes an element; each
    worker keeps at least one head.
    """
    config = model.text_config
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    mixed = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("model_type") not in PLAIN_DECODERS or sliding or mixed:
        return None
    if options.get("hf_overrides") or any(options.number(n, 1) > 1 for n in _SPLIT_CONTEXT):
        return None
    width = _kv_width(str(options.get("kv_cache_dtype", "auto")), options)
    try:
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        layers = config["num_hidden_layers"] // options.pipeline_parallel
        return int(2 * layers * max(1, kv_heads // options.tensor_parallel) * head_size * width)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _kv_width(dtype: str, options: Options) -> int:
    if dtype in ("auto", "bfloat16", "float16"):
        return 4 if dtype == "auto" and options.get("dtype") in _WIDE else 2
    return 1 if dtype.startswith(("fp8", "int8")) else 0


def max_model_len(model: Model, options: Options) -> int | None:
    """Tokens of the longest request: as given, else the model's own; None where vLLM fits it."""
    if options.get("max_model_len") is not None:
        return options.size("max_model_len")
    own = model.text_config.get("max_position_embeddings")
    return own if isinstance(own, int) else None


def gpu_findings(model: Model | None, options: Options, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Free memory, weights and one longest request against the GPUs that the server will have."""
    yield from _count_findings(options, gpus)
    used = gpus[: options.workers]
    if not used:
        return
    tightest = min(used, key=lambda gpu: gpu.free_bytes - _share(gpu, options))
    missing = _share(tightest, options) - tightest.free_bytes
    if missing > 0:
        yield _not_free(tightest, options)
    smallest = min(used, key=lambda gpu: gpu.total_bytes)
    weights = weight_bytes(model, options) if model else None
    if model is None or weights is None:
        return
    mine = _per_worker(weights, options)
    budget = _share(smallest, options)
    if mine > budget:
        yield _weights_too_big(weights, mine, budget, smallest, options)
        return
    explicit = options.size("kv_cache_memory_bytes")
    if explicit is not None:
        yield from _context_findings(model, options, explicit, " (kv_cache_memory_bytes)")
    else:
        beside = f" beside {gib(mine)} of weights"
        yield from _context_findings(model, options, budget - mine, beside)


def _count_findings(options: Options, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    shape = (
        f"tensor_parallel_size {options.tensor_parallel} x pipeline_parallel_size "
        f"{options.pipeline_parallel} x data_parallel_size {options.data_parallel}"
    )
    if options.workers > len(gpus) > 0:
        message = f"{shape} needs {options.workers} GPUs, the server has {len(gpus)}."
        yield error("gpu-count", message, f"Set `gpus={options.workers}`, or a smaller size.")
    elif options.workers < len(gpus):
        message = f"The server has {len(gpus)} GPUs, and {shape} uses {options.workers}."
        fix = f"Set `tensor_parallel_size={len(gpus)}`, or `gpus={options.workers}`."
        yield warning("gpu-count", message, fix)


def _share(gpu: Gpu, options: Options) -> int:
    return int(gpu.total_bytes * options.gpu_memory_utilization)


def _per_worker(weights: int, options: Options) -> int:
    workers = options.tensor_parallel * options.pipeline_parallel
    if options.get("enable_expert_parallel"):
        workers *= options.data_parallel
    return max(0, weights // workers - int(options.number("cpu_offload_gb", 0) * GIB))


def _not_free(gpu: Gpu, options: Options) -> Finding:
    message = (
        f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} are free on {gpu.uuid}, and vLLM refuses "
        f"to start with less than gpu_memory_utilization {options.gpu_memory_utilization:g} of it "
        f"({gib(_share(gpu, options))})."
    )
    if gpu.processes:
        message += " In use by " + ", ".join(describe_process(p) for p in gpu.processes) + "."
    fitting = int(gpu.free_bytes / gpu.total_bytes * 100) / 100 if gpu.total_bytes else 0
    fix = "End what uses this GPU, or take another one."
    if fitting > 0:
        fix = f"Set `gpu_memory_utilization={fitting:g}`, end what uses this GPU, or take another."
    # What holds it may be gone in a minute: waiting for a GPU is another one's decision.
    return warning("gpu-memory", message, fix)


def _weights_too_big(weights: int, mine: int, budget: int, gpu: Gpu, options: Options) -> Finding:
    enough = options.tensor_parallel
    while weights // (enough * options.pipeline_parallel) > budget and enough < 64:
        enough *= 2
    message = (
        f"The weights alone need {gib(mine)} on each GPU, and gpu_memory_utilization "
        f"{options.gpu_memory_utilization:g} of {gpu.uuid} is {gib(budget)}."
    )
    fix = (
        f"Set `tensor_parallel_size={enough}` with `gpus={enough * options.pipeline_parallel}`, or "
        "take a larger GPU or a quantized model."
    )
    return error("gpu-weights", message, fix)


def _context_findings(model: Model, options: Options, room: int, beside: str) -> Iterator[Finding]:
    """One request of full length against the room for the KV cache of each worker."""
    per_token, length = kv_bytes_per_token(model, options), max_model_len(model, options)
    limit = context.own_limit(model, options)
    if length and limit:
        length = min(length, limit)
    if not per_token or not length or per_token * length <= room:
        return
    message = (
        f"One request of {length} tokens needs {gib(per_token * length)} of KV cache on each "
        f"worker, and at most {gib(room)} are there for it{beside}."
    )
    # The cache is handed out in blocks, of up to 128 tokens: a round number below is safe.
    fitting = room // per_token
    step = 1024 if fitting > 1024 else 128
    fix = "Give it more memory, or more GPUs with `tensor_parallel_size`."
    if fitting >= step:
        fix = f"Set `max_model_len` to {fitting // step * step} or less, or g{fix[1:]}"
    yield error("context-length", message, fix)


def cpu_findings(
    model: Model | None,
    options: Options,
    environ: Mapping[str, str],
    available: int,
    total: int,
) -> Iterator[Finding]:
    """Weights and KV cache of a CPU server against this worker's memory (bytes), and one longest
    request against the cache.

    vLLM 0.32 takes VLLM_CPU_KVCACHE_SPACE GiB or kv_cache_memory_bytes for the KV cache of each
    worker, and without both gpu_memory_utilization of all memory, which has to be free.
    """
    kv = _cpu_kv_bytes(options, environ)
    if model and kv:
        yield from _context_findings(model, options, kv, "")
    weights = (weight_bytes(model, options) if model else None) or 0
    needed = weights * options.data_parallel + (kv or 0) * options.workers
    if needed > available:
        parts = " and ".join(
            [f"{gib(weights)} of weights"] * bool(weights)
            + [f"{options.workers} x {gib(kv or 0)} of KV cache"] * bool(kv)
        )
        message = f"A CPU server needs at least {parts}; {gib(available)} of memory are available."
        fix = "Set `env={'VLLM_CPU_KVCACHE_SPACE': ...}` lower, take a smaller or quantized model, "
        fix += "or a worker with more memory."
        yield error("memory", message, fix, passes=needed <= total)
    elif kv is None and options.gpu_memory_utilization * total > available:
        share = options.gpu_memory_utilization
        message = (
            f"vLLM on CPU reserves gpu_memory_utilization {share:g} of {gib(total)} memory "
            f"({gib(share * total)}); {gib(available)} are available."
        )
        fix = "Set `env={'VLLM_CPU_KVCACHE_SPACE': '4'}` (GiB), or a lower gpu_memory_utilization."
        yield warning("memory", message, fix)


def _cpu_kv_bytes(options: Options, environ: Mapping[str, str]) -> int | None:
    space = environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    return int(space) * GIB if space.isdigit() else options.size("kv_cache_memory_bytes")


def offload_findings(options: Options, available: int, total: int) -> Iterator[Finding]:
    """What a GPU server is told to keep in the worker's own memory, against that memory."""
    per_worker = options.number("cpu_offload_gb", 0) * options.workers
    needed = (per_worker + options.number("kv_offloading_size", 0)) * GIB
    if needed > available:
        yield error(
            "memory",
            f"cpu_offload_gb and kv_offloading_size ask for {gib(needed)} of this worker's memory; "
            f"{gib(available)} are available.",
            "Set them lower, or take a worker with more memory.",
            passes=needed <= total,
        )


def download_findings(name: str, free: int, cache: Any) -> Iterator[Finding]:
    """The size that a hub model's name tells (`...-8B-...`, 16 bits), against `free` bytes."""
    match = re.search(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])", name)
    bits = next((b for word, b in _NAME_BITS if word in name.lower()), 16)
    size = float(match[1]) * 1e9 * bits / 8 if match else 0
    if size > free:
        yield warning(
            "disk",
            f"{name} is not in the hub cache yet; by its name it needs about {gib(size)}, and "
            f"{gib(free)} are free in {cache}.",
            "Set `env={'HF_HOME': ...}` or `download_dir` to a larger disk, or make room.",
        )


_NAME_BITS = (
    ("int4", 4),
    ("4bit", 4),
    ("awq", 4),
    ("gptq", 4),
    ("fp4", 4),
    ("fp8", 8),
    ("int8", 8),
)
