"""Rules: the host, its packages, files, ports and devices."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

from airflow_provider_vllm.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        id="port_in_use",
        group="environment",
        pattern=r"\[Errno 98\] (?:Address already in use|error while attempting to bind on address)|[Aa]ddress already in use(?!\. Retrying)|EADDRINUSE|error while attempting to bind on address",
        explanation="Another process already listens on the server's port.",
        first_action="Leave the port at 0 (a free one is chosen), or end the other process.",
        launch=True,
        request=None,
        native=False,
        examples=(
            "OSError: [Errno 98] Address already in use",
            "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
        ),
        near_misses=(
            "(APIServer pid=1) WARNING 11-30 10:00:00 [parallel.py:746] Address already in use. Retrying with a new port.",
        ),
    ),
    Rule(
        id="port_variable_is_uri",
        group="environment",
        pattern=r"VLLM_PORT '[^']*' appears to be a URI|invalid literal for int\(\) with base 10: 'tcp://",
        explanation="Kubernetes set VLLM_PORT, because a service is called vllm.",
        first_action="Rename the Kubernetes service, or set enableServiceLinks: false.",
        launch=False,
        request=None,
        examples=(
            "ValueError: VLLM_PORT 'tcp://10.96.1.2:8000' appears to be a URI. This may be caused by a Kubernetes service discovery issue.",
        ),
    ),
    Rule(
        id="ray_gpu_placement",
        group="environment",
        pattern=r"Cannot provide a placement group (?:of|requiring)|number of required (?:GPUs|\w+) exceeds the total number of available|Current node has no (?:GPU|\w+) available|is not included in a placement group|Not enough resources to allocate|placement group .{0,80}(?:timed? ?out|cannot be (?:created|scheduled))|GPUs in the placement group",
        explanation="Ray cannot give the engine its GPUs: free GPUs scattered over nodes are not GPUs on one node.",
        first_action="See `ray status` for the free GPUs per node; lower tensor_parallel_size to what one node has, or free a node.",
        launch=True,
        request=None,
        examples=(
            "ValueError: Cannot provide a placement group requiring 8 GPUs (placement_group_specs=[{'GPU': 1.0}]) within 1800 seconds. Tensor parallel size may exceed available GPUs in your cluster.",
            "ValueError: The number of required GPUs exceeds the total number of available GPUs in the placement group.",
        ),
    ),
    Rule(
        id="no_device",
        group="environment",
        pattern=r"Failed to infer device type|No CUDA GPUs are available|Found no NVIDIA driver|libcuda\.so\.1: cannot open|NVIDIA driver on your system is too old|Torch not compiled with CUDA|no CUDA-capable device is detected|No HIP GPUs are available|Failed to initialize NVML|NVML(?:Error)?.{0,40}(?:Not Found|Driver/library version mismatch|Driver Not Loaded)|Driver/library version mismatch|device type .{0,20}UnspecifiedPlatform|CUDA is not available",
        explanation="vLLM finds no usable GPU or driver here.",
        first_action="Check nvidia-smi on this worker, in the same container; give the container its GPUs (--gpus all) or update the driver.",
        launch=False,
        request=None,
        examples=(
            "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG` to turn on verbose logging to help debug the issue.",
            "RuntimeError: No CUDA GPUs are available",
        ),
    ),
    Rule(
        id="cuda_in_forked_process",
        group="environment",
        pattern=r"Cannot re-initialize CUDA in forked subprocess",
        explanation="CUDA was used before vLLM forked its processes.",
        first_action="Set VLLM_WORKER_MULTIPROC_METHOD=spawn.",
        launch=False,
        request=None,
        examples=(
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
        ),
    ),
    Rule(
        id="spawn_without_main_guard",
        group="environment",
        pattern=r"An attempt has been made to start a new process before the\s+current process has finished its bootstrapping",
        explanation="The starting script has no `if __name__ == '__main__':`, which spawned processes need.",
        first_action="Put the script's code under `if __name__ == '__main__':`.",
        launch=False,
        request=None,
        examples=(
            "RuntimeError: \n        An attempt has been made to start a new process before the\n        current process has finished its bootstrapping phase.",
        ),
    ),
    Rule(
        id="no_space_left",
        group="environment",
        pattern=r"\[Errno 28\] No space left on device|No space left on device|not enough free disk space|Disk quota exceeded|\[Errno 122\]",
        explanation="The disk is full.",
        first_action="Free space on the disk of the model cache (HF_HOME) and of /tmp, or point them elsewhere.",
        launch=False,
        request=None,
        examples=("OSError: [Errno 28] No space left on device",),
    ),
    Rule(
        id="permission_denied",
        group="environment",
        pattern=r"PermissionError: \[Errno 13\] Permission denied: '(?P<path>[^']*)'|\[Errno 30\] Read-only file system|\[Errno 13\] Permission denied|PermissionError at .{0,20}when downloading",
        explanation="The server may not write or read {path}.",
        first_action="Give its user that path, or point the caches (HF_HOME, VLLM_CACHE_ROOT) to one it may write.",
        launch=False,
        request=None,
        examples=(
            "PermissionError: [Errno 13] Permission denied: '/home/vllm/.cache/vllm/torch_compile_cache'",
        ),
    ),
    Rule(
        id="too_many_open_files",
        group="environment",
        pattern=r"\[Errno 24\] Too many open files(?!`)|Too many open files \(|EMFILE",
        explanation="The server ran out of file descriptors.",
        first_action="Raise the limit (ulimit -n) of the service that starts it.",
        launch=True,
        request=True,
        examples=("OSError: [Errno 24] Too many open files",),
        near_misses=(
            "(APIServer pid=1) WARNING 11-30 09:47:15 [system_utils.py:255] Found ulimit of 20000 and failed to automatically increase. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
        ),
    ),
    Rule(
        id="jit_toolchain",
        group="environment",
        pattern=r"fatal error: (?P<header>\S+\.h(?:pp)?|\S+): No such file|/usr/bin/ld: cannot find (?P<lib>\S+)|Could not find nvcc|nvcc(?:'| |\S*:).{0,40}(?:not found|No such file)|Failed to find C compiler|ninja: build stopped|Ninja build failed|'ninja', '-v'|Ninja is required|CUDA_HOME (?:environment variable is not set|not found)|No such file or directory: '(?:[^']*/)?(?:nvcc|gcc|g\+\+|ninja|c\+\+|cc|ptxas|cl)'|gcc: (?:fatal )?error|returned non-zero exit status \d+\.$|nvcc fatal|InvalidCxxCompiler|CppCompileError|Error building extension|error: command '.*(?:gcc|nvcc|g\+\+|ninja)",
        explanation="Code that is compiled at the start could not be built: the host's toolchain is not complete.",
        first_action="Install what the root line misses (CUDA toolkit headers, gcc, python3-dev, ninja) in the server's environment.",
        launch=False,
        request=None,
        native=True,
        confidence=0.9,
        examples=(
            "/tmp/tmpx/main.c:5:10: fatal error: Python.h: No such file or directory",
            "/usr/bin/ld: cannot find -lcuda: No such file or directory",
            "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist",
        ),
    ),
    Rule(
        id="abi_mismatch",
        group="environment",
        pattern=r"undefined symbol: (?P<symbol>\S+)|version `GLIBC(?:XX)?_\S+' not found|cannot open shared object file|is not subscriptable|DLL load failed|numpy\.dtype size changed|A module that was compiled using NumPy 1|does not exist! Ensure that it is registered|'_OpNamespace' '(?P<ns>\w+)' object has no attribute '(?P<op>\w+)'|operator \S+ does not exist|PyTorch and torchvision were compiled with different CUDA|compiled with different CUDA (?:major )?versions|mutable default .* is not allowed",
        explanation="Binary packages of this environment do not fit each other (vLLM, torch, CUDA, Python).",
        first_action="Install vLLM into a fresh environment, with exactly the torch version that it asks for.",
        launch=False,
        request=None,
        confidence=0.9,
        examples=(
            "ImportError: /opt/x/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEab",
            "AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'",
        ),
        near_misses=(
            "(APIServer pid=1) WARNING 11-30 09:47:15 [_custom_ops.py:20] Failed to import from vllm._C with ImportError('libcuda.so.1: cannot open shared object file')",
        ),
    ),
    Rule(
        id="package_missing",
        group="environment",
        pattern=r"(?:ModuleNotFoundError|ImportError): (?:No module named '(?P<module>[^']+)'|(?P<why>[^\n]+))|PackageNotFoundError|pkg_resources\.\w+|requires? the following packages|[Pp]lease (?:pip )?install (?:`|')?(?P<package>[\w-]+)",
        explanation="A Python package is missing in vLLM's environment or of the wrong version.",
        first_action="Install it in the environment that runs vLLM ([vllm] python), in the version that vLLM asks for.",
        launch=False,
        request=None,
        confidence=0.9,
        examples=(
            "ModuleNotFoundError: No module named 'pandas'",
            "ImportError: cannot import name 'ProcessorMixin' from 'transformers'",
        ),
    ),
    Rule(
        id="file_missing",
        group="environment",
        pattern=r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^']*)'|NotADirectoryError|IsADirectoryError|\[Errno 2\] No such file",
        explanation="A file is missing: {path}.",
        first_action="Check that path on the worker that runs the server.",
        launch=False,
        request=None,
        confidence=0.8,
        examples=("FileNotFoundError: [Errno 2] No such file or directory: '/data/template.jinja'",),
    ),
)
