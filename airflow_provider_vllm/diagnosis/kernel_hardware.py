"""Rules: a GPU kernel, the compiler that builds kernels, or the GPU itself."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

from airflow_provider_vllm.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        id="device_side_assert_line",
        group="kernel_hardware",
        pattern=r"^\S*\.(?:cu|cuh|hip|cpp):\d+:? .*block: \[\d+,\d+,\d+\].*Assertion `+(?P<what>.+?)`+ failed|^\S*:\d+: .*: Assertion `(?P<host>.+?)' failed\.|Assertion `(?P<index>-?\w*.*?sizes?\[.*?)` failed|^python3?\S*: \S.*Assertion `(?P<py>.+?)' failed",
        explanation="An assertion inside a kernel failed: {what}. Usually an index outside a table (vocabulary, positions).",
        first_action="Check that tokenizer and weights belong together and that prompts stay inside the vocabulary; then start once with CUDA_LAUNCH_BLOCKING=1.",
        launch=True,
        request=False,
        native=True,
        examples=(
            '../aten/src/ATen/native/cuda/IndexKernel.cu:92: operator(): block: [12,0,0], thread: [32,0,0] Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.',
        ),
    ),
    Rule(
        id="ecc_error",
        group="kernel_hardware",
        pattern=r"uncorrectable ECC error|CUDA error: .*(?:hardware|ECC)|NVRM: Xid .*: (?:48|63|64|74|79|92|94|95|119|120)\b|GPU has fallen off the bus|GPU is lost|Unable to determine the device handle for GPU",
        explanation="The GPU itself is broken or lost.",
        first_action="Take this GPU out of use and reset or replace it; the next start must use another one.",
        launch=True,
        request=True,
        native=True,
        examples=(
            "(Worker_TP0 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1063] torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.",
        ),
    ),
    Rule(
        id="cuda_illegal_memory_access",
        group="kernel_hardware",
        pattern=r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorIllegalAddress|HIP error: an illegal memory access|misaligned address|illegal instruction was encountered|Warp (?:Illegal|Misaligned)",
        explanation="A kernel touched memory that is not its own; every later CUDA error of that process means nothing.",
        first_action="Start again; if it comes back with the same requests, start once with enforce_eager, then with another attention backend.",
        launch=True,
        request=False,
        native=True,
        examples=(
            "(Worker_TP0 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1063] torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "[rank1]:[E1103 23:14:03.342 ProcessGroupNCCL.cpp:2068] [PG ID 4 PG GUID 19 Rank 1] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
        ),
        near_misses=(
            "(Worker_TP0 pid=9) ERROR 11-30 10:00:00 [multiproc_executor.py:1063] torch.OutOfMemoryError: CUDA out of memory.",
        ),
    ),
    Rule(
        id="device_side_assert",
        group="kernel_hardware",
        pattern=r"device-side assert triggered",
        explanation="A check inside a CUDA kernel failed, usually an index outside a table.",
        first_action="Look above for the line with `Assertion ... failed`; start once with CUDA_LAUNCH_BLOCKING=1.",
        launch=True,
        request=False,
        native=True,
        confidence=0.85,
        examples=(
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] RuntimeError: CUDA error: device-side assert triggered",
        ),
    ),
    Rule(
        id="no_kernel_image",
        group="kernel_hardware",
        pattern=r"no kernel image is available for execution|invalid device function|UnsupportedPtxVersion|PTX was compiled with an unsupported toolchain|CUDA error: the provided PTX|invalid device symbol|no kernel found for|not compiled (?:for|with) (?:sm_|SM|your)|compute capability .{0,40} not (?:supported|compatible) with the current PyTorch|is not compatible with the current PyTorch installation",
        explanation="This build holds no code for this GPU (or its driver is older than the build).",
        first_action="Install a vLLM and torch build for this GPU's compute capability, or update the driver.",
        launch=False,
        request=None,
        examples=(
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] torch.AcceleratorError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        ),
    ),
    Rule(
        id="ptxas_failed",
        group="kernel_hardware",
        pattern=r"ptxas fatal|Value 'sm_\w+' is not defined|PTXASError|ptxas error|ptxas-blackwell|`ptxas` (?:stderr|failed)|NoTritonConfigsError: .*ptxas",
        explanation="The PTX assembler does not know this GPU or refused the code.",
        first_action="Point TRITON_PTXAS_PATH to the ptxas of a CUDA toolkit that knows this GPU.",
        launch=False,
        request=None,
        native=True,
        examples=("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",),
    ),
    Rule(
        id="llvm_error",
        group="kernel_hardware",
        pattern=r"^LLVM ERROR|LLVM ERROR: |PassManager::run failed|Assertion .* in .*llvm|error: .*failed to legalize operation|mlir::",
        explanation="The kernel compiler (LLVM in Triton) gave up on a kernel.",
        first_action="Start with another attention or MoE backend; report the kernel to vLLM.",
        launch=False,
        request=None,
        native=True,
        examples=("LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.shfl.sync.bfly.i32",),
    ),
    Rule(
        id="triton_failed",
        group="kernel_hardware",
        pattern=r"Triton Error \[(?:CUDA|HIP)\]: (?P<what>[^\n]+)|triton\.(?:compiler\.|runtime\.)\S*(?:CompilationError|OutOfResources|errors?\.\w+): ?(?P<why>[^\n]*)|OutOfResources: out of resource: (?P<res>[^\n]+)|triton\S*\.CompilationError|RuntimeError: Cannot find (?:a working triton|Triton)",
        explanation="A Triton kernel could not be built or run on this GPU: {what}",
        first_action="Start once with enforce_eager; if it stays, choose a backend without Triton for this layer.",
        launch=False,
        request=None,
        confidence=0.9,
        examples=(
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] RuntimeError: Triton Error [CUDA]: device kernel image is invalid",
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
        ),
    ),
    Rule(
        id="bfloat16_unsupported",
        group="kernel_hardware",
        pattern=r"Bfloat16 is only supported on GPUs with compute capability of at least|bfloat16 is not supported on",
        explanation="This GPU is too old for bfloat16.",
        first_action="Set dtype to half.",
        launch=False,
        request=None,
        remedy=lambda match, messages: {"dtype": "half"},
        examples=(
            "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5. You can use float16 instead by explicitly setting the `dtype` flag in CLI, for example: --dtype=half.",
        ),
    ),
    Rule(
        id="quantization_unsupported_here",
        group="kernel_hardware",
        pattern=r"quantization method (?P<method>\S+) is not supported for the current GPU\. Minimum capability: (?P<need>\d+)|(?P<quant>\S+) quantization is currently not supported (?:in|on|for) |Quantization scheme is not supported for the current GPU|(?:FP8|fp8|MXFP4|NVFP4|Marlin|marlin|AWQ|GPTQ)\S* .{0,60}(?:not supported|unsupported|requires) .{0,40}(?:GPU|device|capability|hardware|compute)|only supports? .{0,30}compute capability|torch\._scaled_mm is only supported on",
        explanation="This GPU cannot run the model's quantization.",
        first_action="Take a model in another quantization, or a newer GPU.",
        launch=False,
        request=None,
        examples=(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. Current capability: 75. [type=value_error]",
        ),
    ),
    Rule(
        id="no_kernel_for_layer",
        group="kernel_hardware",
        pattern=r"Failed to find a kernel that can implement the|No (?:valid|suitable|compatible) (?:\w+ )?(?:attention |kernel )?(?:backend|kernel)s? (?:found|available|for)|Selected backend \S+ is not valid for this configuration|No \w+ (?:MoE )?backend supports|[Nn]o supported (?:MoE|attention) backend|Unsupported .{0,40}backend|NotImplementedError: No \w+ kernel",
        explanation="No kernel of this build fits the model's layers on this GPU.",
        first_action="Read the reasons that follow this line; usually another dtype, KV cache dtype or attention backend is needed.",
        launch=False,
        request=None,
        confidence=0.9,
        examples=(
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=80, dtype=torch.bfloat16). Reasons: {FLASH_ATTN: [head_size not supported]}.",
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] ValueError: Failed to find a kernel that can implement the ScaledMM linear layer. Reasons: ",
        ),
    ),
    Rule(
        id="attention_kernel_failed",
        group="kernel_hardware",
        pattern=r"Batch(?:Prefill|Decode)WithPagedKVCache\w* failed with error (?P<what>[^\n]+)|FlashAttention only supports|flash_attn.*(?:only supports|not support)|head_size .{0,30}not supported|TllmGenFmhaRunner|cudnn\w* (?:error|status)|CUDNN_STATUS_\w+|CUBLAS_STATUS_\w+|cutlass .{0,40}(?:error|fail|Error)|Error Internal|FlashMLA .{0,30}(?:not|only)|This flash attention build does not support",
        explanation="A GPU library call inside the model failed.",
        first_action="Start once with another attention backend (VLLM_ATTENTION_BACKEND) and enforce_eager.",
        launch=True,
        request=None,
        confidence=0.85,
        examples=(
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] RuntimeError: BatchPrefillWithPagedKVCache failed with error too many resources requested for launch",
            "[rank0]: RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        ),
    ),
    Rule(
        id="cuda_not_ready",
        group="kernel_hardware",
        pattern=r"Error 80[234]|system not yet initialized|CUDA driver initialization failed|CUDA unknown error|cudaGetDeviceCount\(\)\. Did you run|CUDA error: (?:unknown error|initialization error)|forward compatibility was attempted on non supported HW|operation not supported on this OS",
        explanation="The GPU's driver stack is not ready (fabric manager, driver and library versions that differ).",
        first_action="Check nvidia-smi; on NVSwitch machines start nvidia-fabricmanager of the driver's version; after a driver update restart the host.",
        launch=False,
        request=None,
        examples=(
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
        ),
    ),
    Rule(
        id="unspecified_launch_failure",
        group="kernel_hardware",
        pattern=r"unspecified launch failure|CUDA error: (?:launch failed|invalid configuration|invalid argument|invalid resource handle|operation not permitted|the launch timed out|too many resources)|HIP error: |hipError\w+|HSA_STATUS_ERROR\w*|CUDA_ERROR_\w+|CUDA error: (?P<what>[^\n]+)|cudaError\w+|AcceleratorError: |NPU (?:function )?error|aclnn\w+ failed|ERR\d{5} |XPU error",
        explanation="A call to the GPU failed.",
        first_action="Look at the kernel log for Xid lines of this GPU; start once with CUDA_LAUNCH_BLOCKING=1 to see the real place.",
        launch=True,
        request=None,
        confidence=0.85,
        examples=(
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] torch.AcceleratorError: CUDA error: unspecified launch failure",
        ),
        near_misses=(
            "(EngineCore_DP0 pid=9) ERROR 10-30 10:00:00 [core.py:710] RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ),
    ),
)
