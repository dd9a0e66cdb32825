"""Arithmetic of memory: bounds that are certain, and silence where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.server.checks import memory
from airflow_provider_vllm.server.checks.finding import Finding
from airflow_provider_vllm.server.checks.model import Model, look_up
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.checks.safetensors import Tensor
from airflow_provider_vllm.server.gpus import Gpu, GpuProcess
from airflow_provider_vllm.server.sizes import GIB
from tests.fakes.model_files import LLAMA

BILLION = 10**9


def model(parameters: float = 8, dtype: str = "BF16", **config: Any) -> Model:
    width = {"F32": 4, "BF16": 2, "I8": 1}[dtype]
    count = int(parameters * BILLION)
    return Model(
        Path("/m"),
        from_hub=False,
        config={**LLAMA, **config},
        tensors={"model.layers.0.w": Tensor(dtype, (count,), count * width)},
    )


def gpu(total: float = 80, free: float | None = None, uuid: str = "GPU-a") -> Gpu:
    free = total if free is None else free
    held = (GpuProcess(7, int((total - free) * GIB)),) if free < total else ()
    sizes = (int(total * GIB), int(free * GIB), int((total - free) * GIB))
    return Gpu(uuid, 0, "H100", *sizes, held)


def found(model: Model | None, gpus: list[Gpu], **args: Any) -> list[Finding]:
    return list(memory.gpu_findings(model, Options.of(args), gpus))


def weights(model: Model, **args: Any) -> int | None:
    return memory.weight_bytes(model, Options.of(args))


def test_weights_as_they_lie_on_disk_and_as_they_are_converted() -> None:
    assert weights(model(8)) == 16 * BILLION
    assert weights(model(8, "F32")) == 16 * BILLION  # "auto" makes 16 bits of them
    assert weights(model(8, "F32"), dtype="float32") == 32 * BILLION
    assert weights(model(8), dtype="float32") == 32 * BILLION
    assert weights(model(8, "I8"), dtype="float32") == 8 * BILLION
    assert weights(model(8), quantization="fp8") == 8 * BILLION
    assert weights(model(8), quantization="bitsandbytes") == 4 * BILLION
    assert weights(model(8, "I8", quantization_config={}), quantization="gptq") == 8 * BILLION


def test_what_is_not_loaded_does_not_count() -> None:
    tensors = {
        "model.embed_tokens.weight": Tensor("BF16", (10,), 20),
        "lm_head.weight": Tensor("BF16", (10,), 20),
        "model.layers.31.w": Tensor("BF16", (10,), 20),
        "model.layers.32.w": Tensor("BF16", (10,), 20),  # for speculative decoding
    }
    whole = Model(Path("/m"), False, LLAMA, tensors)
    assert weights(whole) == 60
    assert weights(Model(Path("/m"), False, {**LLAMA, "tie_word_embeddings": True}, tensors)) == 40


@pytest.mark.parametrize(
    "args",
    [
        {"hf_overrides": {"num_hidden_layers": 2}},
        {"language_model_only": True},
        {"quantization": "new"},
    ],
)
def test_no_bound_where_options_change_what_is_loaded(args: dict) -> None:
    assert weights(model(8), **args) is None
    assert found(model(800), [gpu()], **args) == []


def test_kv_cache_of_a_token() -> None:
    def per_token(model: Model, **args: Any) -> int | None:
        return memory.kv_bytes_per_token(model, Options.of(args))

    assert per_token(model()) == 2 * 32 * 8 * 128 * 2  # 128 KiB, as for Llama 3.1 8B
    assert per_token(model(), kv_cache_dtype="fp8") == 2 * 32 * 8 * 128
    assert per_token(model(), dtype="float32") == 2 * 32 * 8 * 128 * 4
    assert per_token(model(), tensor_parallel_size=4) == 2 * 32 * 2 * 128 * 2
    assert per_token(model(), tensor_parallel_size=16) == 2 * 32 * 1 * 128 * 2
    assert per_token(model(), pipeline_parallel_size=2) == 2 * 16 * 8 * 128 * 2
    assert per_token(model(head_dim=64)) == 2 * 32 * 8 * 64 * 2
    for unknown in (
        {"model_type": "deepseek_v3"},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"num_attention_heads": None},
    ):
        assert per_token(model(**unknown)) is None
    assert per_token(model(sliding_window=4096, use_sliding_window=False)) == 131072
    assert not per_token(model(), kv_cache_dtype="nvfp4")
    assert per_token(model(), decode_context_parallel_size=2) is None


def test_weights_that_fit_no_gpu_say_how_many_would_do() -> None:
    (finding,) = found(model(70), [gpu(80)], max_model_len=1024)
    assert (finding.check, finding.level) == ("gpu-weights", "error")
    assert "130.39 GiB" in finding.message  # 140e9 bytes
    assert "73.60 GiB" in finding.message
    assert "`tensor_parallel_size=2` with `gpus=2`" in finding.fix
    assert found(model(70), [gpu(), gpu()], tensor_parallel_size=2, max_model_len=1024) == []
    assert found(model(70), [gpu(), gpu()], pipeline_parallel_size=2, max_model_len=1024) == []
    assert found(model(70), [gpu()], cpu_offload_gb=80, max_model_len=1024) == []


def test_data_parallel_replicas_hold_the_weights_each() -> None:
    both = [gpu(), gpu()]
    assert found(model(70), both, data_parallel_size=2)[0].check == "gpu-weights"
    experts = {"data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 1024}
    assert found(model(70), both, **experts) == []


def test_a_context_that_cannot_fit_says_what_would() -> None:
    (finding,) = found(model(8), [gpu(24)])
    assert (finding.check, finding.level) == ("context-length", "error")
    room = int(24 * GIB * 0.92) - 16 * BILLION
    assert "131072 tokens needs 16.00 GiB" in finding.message
    assert "7.18 GiB are there for it beside 14.90 GiB of weights" in finding.message
    assert room // 131072 == 58809
    assert finding.fix.startswith("Set `max_model_len` to 58368 or less")
    assert found(model(8), [gpu(24)], max_model_len="32k") == []
    assert found(model(8), [gpu(24)], max_model_len=-1) == []
    assert found(model(8), [gpu(24)], max_model_len="auto") == []
    assert found(model(8), [gpu(80)]) == []
    explicit = found(model(8), [gpu(80)], kv_cache_memory_bytes=GIB)
    assert [finding.check for finding in explicit] == ["context-length"]


def test_memory_that_is_not_free_says_which_share_would_be() -> None:
    (finding,) = found(None, [gpu(80, free=50.5)])
    assert (finding.check, finding.level) == ("gpu-memory", "warning")
    assert "50.50 GiB of 80.00 GiB are free on GPU-a" in finding.message
    assert "gpu_memory_utilization 0.92" in finding.message
    assert "pid 7" in finding.message
    assert "`gpu_memory_utilization=0.63`" in finding.fix
    assert found(None, [gpu(80, free=50.5)], gpu_memory_utilization=0.63) == []
    full = found(None, [gpu(80, free=0)])[0]
    assert "`gpu_memory_utilization=" not in full.fix


def test_number_of_gpus_against_the_parallel_sizes() -> None:
    (finding,) = found(None, [gpu()], tensor_parallel_size=2, pipeline_parallel_size=2)
    assert (finding.check, finding.level) == ("gpu-count", "error")
    assert "needs 4 GPUs, the server has 1" in finding.message
    (finding,) = found(None, [gpu(), gpu()])
    assert (finding.check, finding.level) == ("gpu-count", "warning")
    assert finding.fix == "Set `tensor_parallel_size=2`, or `gpus=1`."


def cpu(
    model: Model | None, available: float, environ: dict[str, str] | None = None, **args: Any
) -> list[Finding]:
    sizes = int(available * GIB), 32 * GIB
    return list(memory.cpu_findings(model, Options.of(args), environ or {}, *sizes))


def test_a_cpu_server_needs_weights_and_cache_in_memory() -> None:
    space = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    short = model(8, max_position_embeddings=2048)
    (finding,) = cpu(short, 16, space)
    assert (finding.check, finding.level) == ("memory", "error")
    assert "14.90 GiB of weights and 1 x 4.00 GiB of KV cache; 16.00 GiB" in finding.message
    assert cpu(short, 19, space) == []
    assert cpu(short, 30, space, data_parallel_size=2)[0].level == "error"
    assert cpu(None, 19, space) == []
    assert cpu(None, 3, kv_cache_memory_bytes=4 * GIB)[0].level == "error"


def test_a_context_that_does_not_fit_the_cache_of_a_cpu_server(instruct_model: Path) -> None:
    """vLLM 0.32 on this model: 0.18 GiB needed, 0.09 GiB there, estimated maximum 4096."""
    small, _ = look_up(str(instruct_model), Options.of({}), {})
    (finding,) = cpu(small, 30, kv_cache_memory_bytes=100_000_000)
    assert (finding.check, finding.level) == ("context-length", "error")
    assert "8192 tokens needs 0.18 GiB" in finding.message
    assert finding.fix.startswith("Set `max_model_len` to 4096 or less")
    assert cpu(small, 30, kv_cache_memory_bytes=200_000_000) == []
    assert cpu(small, 30, {"VLLM_CPU_KVCACHE_SPACE": "1"}) == []


def test_a_cpu_server_without_a_size_of_cache_reserves_a_share() -> None:
    (finding,) = cpu(None, 20)
    assert finding.level == "warning"
    assert "0.92 of 32.00 GiB memory (29.44 GiB); 20.00 GiB are available" in finding.message
    assert cpu(None, 20, gpu_memory_utilization=0.5) == []


def test_what_a_gpu_server_keeps_in_host_memory() -> None:
    def offload(**args: Any) -> list[Finding]:
        return list(memory.offload_findings(Options.of(args), 32 * GIB, 64 * GIB))

    assert offload() == []
    assert offload(cpu_offload_gb=16) == []
    (finding,) = offload(cpu_offload_gb=16, tensor_parallel_size=4)
    assert "ask for 64.00 GiB" in finding.message
    assert offload(kv_offloading_size=40)[0].level == "error"


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Qwen/Qwen3-8B", 16),
        ("Qwen/Qwen3-0.6B", 1.2),
        ("org/Llama-3.1-70B-Instruct-AWQ", 35),
        ("org/Llama-70B-FP8", 70),
        ("org/mixtral-8x7B", 0),
        ("org/gpt2", 0),
    ],
)
def test_the_size_that_a_name_tells(name: str, size: float) -> None:
    enough, short = int(size * BILLION), int(size * BILLION) - 10**6
    assert list(memory.download_findings(name, enough, "/cache")) == []
    assert len(list(memory.download_findings(name, max(0, short), "/cache"))) == bool(size)
