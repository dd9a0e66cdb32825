"""Rules: not enough GPU, host or cache memory."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from airflow_provider_vllm.diagnosis.rule import Rule

_OOM = r"OutOfMemoryError: (?:CUDA|HIP|XPU|NPU) out of memory|(?:CUDA|HIP) out of memory\. Tried|(?:CUDA|HIP)(?: driver)? error: out of memory|NPU out of memory|cudaErrorMemoryAllocation|UR_RESULT_ERROR_OUT_OF_(?:DEVICE|RESOURCES)"
_TRIED = r"(?:.*?Tried to allocate (?P<tried>[\d.]+ \w+)[^\n]*?(?:of which|;) (?P<free>[\d.]+ \w+) (?:is )?free)?"


def estimated_length(match: re.Match[str], _: Sequence[str]) -> dict[str, Any] | None:
    """The longest context that vLLM says would fit."""
    length = match.groupdict().get("estimate") or match.groupdict().get("stored")
    return {"max_model_len": int(length)} if length and int(length) > 0 else None


def free_share(match: re.Match[str], messages: Sequence[str]) -> dict[str, Any] | None:
    """The largest gpu_memory_utilization that the fullest of the GPUs allows, 2 decimals down."""
    pattern = re.compile(r"\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less")
    shares = [
        float(found["free"]) / float(found["total"])
        for message in messages
        for found in pattern.finditer(message)
        if float(found["total"]) > 0
    ]
    if not shares:
        return None
    share = int(min(shares) * 100) / 100
    return {"gpu_memory_utilization": share} if 0.05 <= share < 1 else None


def cpu_share(match: re.Match[str], messages: Sequence[str]) -> dict[str, Any] | None:
    """What vLLM itself proposes (0.5), or what is free where that is less."""
    free = free_share(match, messages)
    return {"gpu_memory_utilization": min(0.5, *free.values())} if free else None


def mamba_seqs(match: re.Match[str], _: Sequence[str]) -> dict[str, Any] | None:
    """The number of sequences for which there are Mamba blocks."""
    return {"max_num_seqs": int(match["blocks"])} if int(match["blocks"]) > 0 else None


def half_of_dummies(match: re.Match[str], _: Sequence[str]) -> dict[str, Any] | None:
    """Half of the sequences that the warm up could not hold."""
    return {"max_num_seqs": max(1, int(match["dummies"]) // 2)}


RULES: tuple[Rule, ...] = (
    Rule(
        id="no_available_kv_cache_memory",
        group="capacity",
        pattern=r"No available memory for the cache blocks|on kv cache allocation is less than requested memory for kv \((?:-[\d.]+|0(?:\.0+)?)/",
        explanation="After the weights and the profiling run no memory was left for a single KV cache block.",
        first_action="Raise gpu_memory_utilization by 0.05 (on a CPU: VLLM_CPU_KVCACHE_SPACE).",
        launch=False,
        request=None,
        examples=(
            "(EngineCore pid=7) ERROR 11-30 09:49:07 [core.py:1510] ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
            "ERROR 11-20 08:34:06 engine.py:366] No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
            "(Worker pid=7) ERROR 11-30 09:49:07 [multiproc_executor.py:1063] ValueError: Available memory on node 0 (20.1/23.54 GiB) on kv cache allocation is less than requested memory for kv (-0.9/1.18 GiB). Reduce CPU memory used by other processes.",
        ),
        near_misses=(
            "(Worker pid=7) ERROR 11-30 09:49:07 [multiproc_executor.py:1063] ValueError: Available memory on node 0 (4.0/23.54 GiB) on kv cache allocation is less than requested memory for kv (9.1/11.77 GiB). Reduce CPU memory used by other processes.",
            "(EngineCore pid=7) INFO 11-30 09:49:07 [gpu_worker.py:760] Available KV cache memory: 0.02 GiB",
        ),
    ),
    Rule(
        id="max_model_len_exceeds_kv_cache",
        group="capacity",
        pattern=r"max(?:imum)? seq(?:uence)? len(?:gth)? \((?P<asked>[\d,]+)\)(?:,? .*?larger than the available KV cache memory)(?:[\s\S]{0,120}?estimated maximum model length is (?P<estimate>\d+))?"
        r"|max seq len \((?P<asked_old>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((?P<stored>\d+)\)"
        r"|Cannot auto-fit max_model_len",
        explanation="One request of the full context length needs more KV cache than there is memory for.",
        first_action="Lower max_model_len to what the message says fits.",
        launch=False,
        request=None,
        remedy=estimated_length,
        examples=(
            "(EngineCore pid=7) ERROR 11-30 09:56:05 [core.py:1510] ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (9.21 GiB). Based on the available memory, the estimated maximum model length is 75440. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
            "ERROR 05-23 09:31:47 [core.py:396] ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is needed, which is larger than the available KV cache memory (2.11 GiB). Based on the available memory,  the estimated maximum model length is 15360.",
            "[rank0]: ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (45312). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
        ),
        near_misses=(
            "(EngineCore pid=7) INFO 11-30 09:56:05 [kv_cache_utils.py:2327] GPU KV cache size: 75,440 tokens, Maximum concurrency for 131,072 tokens per request: 0.57x",
        ),
    ),
    Rule(
        id="cpu_memory_below_requested",
        group="capacity",
        pattern=r"Available memory on node (?P<node>\d+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on (?:startup is less than desired CPU memory(?: utilization \((?P<share>[\d.]+), (?P<wanted>[\d.]+) GiB\))?|kv cache allocation is less than requested memory for kv \((?!0(?:\.0+)?/)[\d.]+/(?P<reserved>[\d.]+) GiB\))",
        explanation="A CPU server reserves gpu_memory_utilization[ ({share})] of the {total} GiB of node {node}[, which is {wanted} GiB][, which is {reserved} GiB], and only {free} GiB were free.",
        first_action="Lower gpu_memory_utilization below what is free ({free} of {total} GiB; vLLM proposes 0.5).",
        launch=True,
        request=None,
        remedy=cpu_share,
        examples=(
            "(Worker pid=15465) ERROR 11-30 16:20:05 [multiproc_executor.py:1063] ValueError: Available memory on node 0 (20.68/23.54 GiB) on startup is less than desired CPU memory utilization (0.92, 21.66 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory reserved (despite its name).",
            "(Worker pid=7) ERROR 11-30 09:49:07 [multiproc_executor.py:1063] ValueError: Available memory on node 0 (4.0/23.54 GiB) on kv cache allocation is less than requested memory for kv (9.1/11.77 GiB). Reduce CPU memory used by other processes.",
        ),
        near_misses=(
            "(Worker pid=14515) ERROR 11-30 09:50:35 [multiproc_executor.py:1063] ValueError: Available memory on node 0 (8.8/12.21 GiB) on kv cache allocation is less than requested memory for kv (200.0 GiB).",
        ),
    ),
    Rule(
        id="free_memory_below_requested",
        group="capacity",
        pattern=r"Free memory on device.{0,40}\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than (?:desired GPU memory utilization|the engine's budget)[^(\n]{0,60}\((?P<share>[\d.]+), (?P<wanted>[\d.]+) GiB\)"
        r"|Free memory on device.{0,80} on startup is less than (?:desired GPU|the engine's budget)"
        r"|Externally held weights on device",
        explanation="Something else already holds memory of this GPU[: {free} of {total} GiB are free, {wanted} GiB were asked for].",
        first_action="End what holds the memory (nvidia-smi), or lower gpu_memory_utilization below the free share.",
        launch=True,
        request=None,
        remedy=free_share,
        examples=(
            "(EngineCore_DP0 pid=17374) ERROR 09-28 15:47:24 [core.py:718] ValueError: Free memory on device (3.22/4.0 GiB) on startup is less than desired GPU memory utilization (0.9, 3.6 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
            "(Worker_TP0 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:953] ValueError: Free memory on device cuda:0 (11.2/79.15 GiB) on startup is less than desired GPU memory utilization (0.92, 72.8 GiB).",
        ),
        near_misses=(
            "(EngineCore pid=7) ERROR 11-30 09:49:07 [core.py:1510] ValueError: No available memory for the cache blocks.",
        ),
    ),
    Rule(
        id="cpu_kv_memory",
        group="capacity",
        pattern=r"Available memory on node (?P<node>\d+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on kv cache allocation is less than requested memory for kv \((?P<wanted>[\d.]+) GiB\)"
        r"|Not enough (?:CPU )?memory for .{0,20}KV cache|invalid literal for int\(\) with base 10: '[\d.]+'(?=[\s\S]*kvcache)",
        explanation="The CPU's KV cache is larger than the free memory[: it was set to {wanted} GiB, and only {free} GiB of node {node} are free].",
        first_action="Lower VLLM_CPU_KVCACHE_SPACE (GiB) below the free memory of the node.",
        launch=False,
        request=None,
        examples=(
            "(Worker pid=14515) ERROR 11-30 09:50:35 [multiproc_executor.py:1063] ValueError: Available memory on node 0 (8.8/12.21 GiB) on kv cache allocation is less than requested memory for kv (200.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes.",
        ),
    ),
    Rule(
        id="mamba_blocks",
        group="capacity",
        pattern=r"max_num_seqs \((?P<seqs>\d+)\) exceeds available Mamba cache blocks \((?P<blocks>\d+)\)",
        explanation="There are Mamba cache blocks for {blocks} sequences, but max_num_seqs is {seqs}.",
        first_action="Lower max_num_seqs to {blocks}.",
        launch=False,
        request=None,
        remedy=mamba_seqs,
        examples=(
            "(EngineCore pid=7) ERROR 11-30 09:56:05 [core.py:1510] ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (113). Each decode request needs one; lower max_num_seqs to at most 113.",
        ),
    ),
    Rule(
        id="profiling_disturbed",
        group="capacity",
        pattern=r"Error in memory profiling\. Initial free memory",
        explanation="Another process gave GPU memory back while vLLM measured its own, so the measurement is void.",
        first_action="Start it again once the other process is gone.",
        launch=True,
        request=None,
        examples=(
            "(EngineCore_DP0 pid=7) ERROR 10-01 09:56:05 [core.py:700] AssertionError: Error in memory profiling. Initial free memory 21.5 GiB, current free memory 30.1 GiB. This happens when other processes sharing the same container release GPU memory while vLLM is profiling during initialization.",
        ),
    ),
    Rule(
        id="cuda_oom_sampler_warmup",
        group="capacity",
        pattern=r"(?:CUDA )?out of memory occurred when warming up (?:sampler|pooler)(?: with (?P<dummies>\d+) dummy requests)?",
        explanation="The GPU ran out of memory while the sampler was warmed up[ with {dummies} requests at once].",
        first_action="Lower max_num_seqs.",
        launch=False,
        request=None,
        remedy=lambda match, messages: (
            half_of_dummies(match, messages) if match["dummies"] else None
        ),
        examples=(
            "(EngineCore_DP0 pid=7) ERROR 10-01 09:56:05 [core.py:700] RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        ),
    ),
    Rule(
        id="cuda_oom_sleep_allocator",
        group="capacity",
        pattern=r"CUDA Error: out of memory at .*cumem_allocator",
        explanation="The sleep-mode allocator could not map its memory back: another process took it meanwhile.",
        first_action="Free the GPU memory that others hold, then start again.",
        launch=True,
        request=None,
        native=True,
        examples=("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",),
    ),
    Rule(
        id="cuda_oom_weights",
        group="capacity",
        pattern=rf"(?:{_OOM}){_TRIED}",
        frames=r"load_model|create_weights|load_weights|process_weights_after_loading|model_loader/|gptq_marlin_repack|initialize_model",
        explanation="The model's weights do not fit into the GPU's memory.",
        first_action="Spread the model over more GPUs (gpus, tensor_parallel_size).",
        launch=False,
        request=None,
        examples=(
            "ERROR 05-23 09:31:47 [core.py:396] EngineCore failed to start.\n"
            "ERROR 05-23 09:31:47 [core.py:396] Traceback (most recent call last):\n"
            'ERROR 05-23 09:31:47 [core.py:396]   File "vllm/v1/worker/gpu_worker.py", line 164, in load_model\n'
            "ERROR 05-23 09:31:47 [core.py:396]     self.model_runner.load_model()\n"
            "ERROR 05-23 09:31:47 [core.py:396] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 56.88 MiB is free.",
        ),
        near_misses=(
            "(Worker pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1063] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
    ),
    Rule(
        id="cuda_oom_compile",
        group="capacity",
        pattern=rf"autotuning code block: (?:CUDA|HIP) out of memory|InductorError: OutOfMemoryError|(?:{_OOM}){_TRIED}",
        frames=r"_inductor/\S*(?:autotune|select_algorithm|codegen|compile_fx|graph\.py|benchmark)|autotune_process",
        explanation="The GPU ran out of memory while torch.compile tried kernels out.",
        first_action="Lower gpu_memory_utilization by 0.05.",
        launch=False,
        request=None,
        examples=(
            "(EngineCore pid=7) ERROR 10-01 09:56:05 [core.py:1108] Traceback (most recent call last):\n"
            '(EngineCore pid=7) ERROR 10-01 09:56:05 [core.py:1108]   File "torch/_inductor/codegen/wrapper.py", line 1700, in generate_and_run_autotune_block\n'
            "(EngineCore pid=7) ERROR 10-01 09:56:05 [core.py:1108] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 15.70 GiB of which 600.00 MiB is free.",
        ),
    ),
    Rule(
        id="cuda_oom_graph_capture",
        group="capacity",
        pattern=rf"(?:{_OOM}){_TRIED}",
        frames=r"capture_model|capture_graph|cuda_graph|cudagraph|compile_or_warm_up_model",
        explanation="The GPU ran out of memory while CUDA graphs were captured.",
        first_action="Lower gpu_memory_utilization by 0.05.",
        launch=False,
        request=None,
        examples=(
            "(EngineCore_DP0 pid=7) ERROR 10-01 09:56:05 [core.py:700] Traceback (most recent call last):\n"
            '(EngineCore_DP0 pid=7) ERROR 10-01 09:56:05 [core.py:700]   File "vllm/v1/worker/gpu_model_runner.py", line 3000, in capture_model\n'
            "(EngineCore_DP0 pid=7) ERROR 10-01 09:56:05 [core.py:700] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 98.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 6.88 MiB is free.",
        ),
    ),
    Rule(
        id="cuda_oom_profile",
        group="capacity",
        pattern=rf"(?:{_OOM}){_TRIED}|autotuning code block: (?:CUDA|HIP) out of memory",
        frames=r"profile_run|determine_available_memory|determine_num_available_blocks|_dummy_run",
        explanation="The GPU ran out of memory during the profiling run with the largest batch.",
        first_action="Lower max_num_batched_tokens.",
        launch=False,
        request=None,
        examples=(
            "(EngineCore_DP0 pid=7) ERROR 10-01 09:56:05 [core.py:700] Traceback (most recent call last):\n"
            '(EngineCore_DP0 pid=7) ERROR 10-01 09:56:05 [core.py:700]   File "vllm/v1/worker/gpu_worker.py", line 230, in determine_available_memory\n'
            '(EngineCore_DP0 pid=7) ERROR 10-01 09:56:05 [core.py:700]   File "vllm/model_executor/models/llama.py", line 80, in forward\n'
            "(EngineCore_DP0 pid=7) ERROR 10-01 09:56:05 [core.py:700] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 23.56 GiB of which 1.88 GiB is free.",
        ),
    ),
    Rule(
        id="cuda_oom_kv_cache",
        group="capacity",
        pattern=rf"(?:{_OOM}){_TRIED}",
        frames=r"initialize_kv_cache|_allocate_kv_cache|initialize_from_config|CacheEngine|cache_engine|initialize_cache|warm_up_model|wake_up",
        explanation="The GPU ran out of memory when the KV cache was laid out or woken up.",
        first_action="Lower gpu_memory_utilization by 0.05 and see with nvidia-smi who else uses the GPU.",
        launch=True,
        request=None,
        examples=(
            "ERROR 05-23 09:31:47 [core.py:396] Traceback (most recent call last):\n"
            'ERROR 05-23 09:31:47 [core.py:396]   File "vllm/v1/worker/gpu_model_runner.py", line 2000, in initialize_kv_cache\n'
            "ERROR 05-23 09:31:47 [core.py:396] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
        ),
    ),
    Rule(
        id="cuda_oom_runtime",
        group="capacity",
        pattern=rf"(?:{_OOM}){_TRIED}",
        frames=r"execute_model|_process_engine_step|run_busy_loop|sample_tokens|engine_step",
        explanation="The GPU ran out of memory while it served requests.",
        first_action="Lower gpu_memory_utilization by 0.05, so that activations have room beside the KV cache.",
        launch=True,
        request=True,
        examples=(
            "(EngineCore pid=104) ERROR 05-05 12:36:59 [core.py:1129] Traceback (most recent call last):\n"
            '(EngineCore pid=104) ERROR 05-05 12:36:59 [core.py:1129]   File "vllm/v1/worker/gpu_worker.py", line 700, in execute_model\n'
            "(EngineCore pid=104) ERROR 05-05 12:36:59 [core.py:1129] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 56.88 MiB is free.",
        ),
    ),
    Rule(
        id="cuda_oom",
        group="capacity",
        pattern=rf"(?:{_OOM}){_TRIED}|torch\.cuda\.OutOfMemoryError|may be caused by insufficient memory to allocate the weight",
        explanation="The GPU ran out of memory.",
        first_action="See with nvidia-smi who else uses the GPU; if nobody does, lower gpu_memory_utilization.",
        launch=True,
        request=None,
        examples=(
            "(Worker pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1063] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "(EngineCore pid=104) ERROR 05-05 12:36:59 [core.py:1129] torch.AcceleratorError: CUDA error: out of memory",
            "(EngineCore pid=104) ERROR 05-05 12:36:59 [core.py:1129] RuntimeError: Failed to create unquantized linear weights. This may be caused by insufficient memory to allocate the weight.",
        ),
        near_misses=("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",),
    ),
    Rule(
        id="accelerator_oom",
        group="capacity",
        pattern=r"Ran out of memory in memory space (?P<space>\w+)|RESOURCE_EXHAUSTED: |nrt_tensor_allocate .{0,60}Allocation Failure",
        explanation="The accelerator ran out of memory.",
        first_action="Lower max_model_len.",
        launch=False,
        request=None,
        confidence=0.9,
        examples=(
            "ERROR 06-11 13:57:14 [core.py:515] ValueError: Ran out of memory in memory space vmem while allocating on stack for %name.32",
        ),
    ),
    Rule(
        id="kv_blocks_exhausted",
        group="capacity",
        pattern=r"NoFreeBlocksError|No free blocks (?:are )?available",
        explanation="The scheduler found no free KV cache block for a sequence that it had let in.",
        first_action="Lower max_num_seqs; upgrade vLLM, since the scheduler should have waited.",
        launch=True,
        request=True,
        confidence=0.85,
        examples=(
            "ERROR 12-13 08:58:11 engine.py:165] vllm.core.block.interfaces.BlockAllocator.NoFreeBlocksError",
        ),
    ),
    Rule(
        id="host_memory",
        group="capacity",
        pattern=r"^MemoryError(?::? *$|: Unable to)|Too large swap space|DefaultCPUAllocator: can't allocate memory|\[Errno 12\] Cannot allocate memory|std::bad_alloc|CUDA error: .*cudaHostAlloc|Unable to allocate .* for an array with shape",
        explanation="The host (not the GPU) refused memory.",
        first_action="Give the server more host memory or a higher limit (ulimit -v, the container's limit).",
        launch=False,
        request=None,
        examples=(
            "MemoryError",
            "ValueError: Too large swap space. 64.00 GiB out of the 62.80 GiB total CPU memory is allocated for the swap space.",
            "(Worker pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:953] RuntimeError: [enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)",
        ),
    ),
    Rule(
        id="preemption_thrash",
        group="capacity",
        pattern=r"is preempted by PreemptionMode\.(?:RECOMPUTE|SWAP) mode because there is not enough KV cache space",
        explanation="Requests were thrown out of the KV cache again and again and computed anew.",
        first_action="Lower max_num_seqs.",
        launch=True,
        request=True,
        confidence=0.5,
        victim=True,
        examples=(
            "ERROR 08-02 10:00:00 scheduler.py:895] Sequence group cmpl-1 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space.",
        ),
    ),
)
