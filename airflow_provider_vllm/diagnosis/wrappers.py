"""Which messages only repeat, announce or follow a failure, and so are never its cause."""

from __future__ import annotations

import re

CHARS = 2000
"""So much of a first line is asked about."""

# Says that another process failed, and where vLLM names that process, which.
WRAPPER = re.compile(
    r"EngineCore (?:failed to start|encountered a fatal error|encountered an issue|hit an exception)"
    r"|Worker(?:Proc)? (?:failed to start|failed\.|hit an exception|was terminated|initialization f)"
    r"|WorkerProc initialization failed|RayWorkerProc failed"
    r"|(?:Frontend process failed during e|E)ngine core initialization(?: failed)?"
    r"|Worker proc \S+ died unexpectedly|RayWorkerProc rank=\S+ died unexpectedly"
    r"|Engine core proc \S+ died unexpectedly|engine core exited unexpectedly"
    r"|Executor failed\.|EngineDeadError|AsyncEngineDeadError|MQEngineDeadError"
    r"|AsyncLLM output_handler failed|Got fatal signal from worker processes"
    r"|MQLLMEngine (?:is already dead|terminated)|Engine process (?:failed to start|died)"
    r"|Engine (?:loop has died|loop is not running|background task failed)"
    r"|Background loop (?:has errored|is stopped)|Task finished unexpectedly"
    r"|ERROR:\s+Exception in ASGI application|Application startup failed"
    r"|ZMQError: Operation not supported|Task exception was never retrieved"
    r"|Future exception was never retrieved|Exception in callback"
    r"|^Worker VllmWorker\S* pid \d+ (?:died|terminated)|Killing local vLLM worker processes"
    r"|subprocess\.CalledProcessError: Command '.*vllm"
    r"|^(?:\w+\.)*RuntimeError: cancelled$|^(?:concurrent\.futures\.|asyncio\.exceptions\.)?CancelledError"
    r"|^SystemExit\b|^RuntimeError: Failed to start (?:the )?(?:vLLM|server)"
    r"|DP Coordinator process (?:failed|died)|One of the (?:engine|dp) processes"
    r"|Process \w+ \(pid: \d+\) died with exit code"
    r"|^(?:Exception|RuntimeError): (?:call_\w+|Call to \w+) method failed"
    r"|^(?:RuntimeError|EngineGenerateError|Exception): (?:Engine core|EngineCore) (?:error|died)"
    r"|^\w*Error: Call to \w+ method failed|Invocation of \w+ method failed"
    r"|ray\.exceptions\.RayTaskError\(|ChildProcessError: worker died|RuntimeError\('Engine process"
    r"|ExceptionGroup: unhandled errors|operation failed in the TorchScript interpreter"
    r"|^RuntimeError: Error raised in subprocess|CalledProcessError: .*models\.registry"
    r"|Error in inspecting model architecture"
    r"|Worker VllmWorkerProcess pid \d+ died|^NoneType: None$"
    r"|^Error executing method |Exception in worker VllmWorkerProcess while processing method"
)
# Names a process that is gone.
DEATH = re.compile(
    r"^(?:Worker proc|Engine core proc|RayWorkerProc|Worker Vllm\w+ pid) \S+ died(?: unexpectedly)?"
)
# Repeats the message of the process that failed: good where that process's own lines are missing.
QUOTE = re.compile(
    r"Worker failed with error ['\"](?P<text>.+)|Error executing method '?\w+'?\. This might cause"
    r"|Call to \w+ method failed: (?P<call>.+)"
    r"|while processing method \w+: (?P<method>.+?)(?:, Traceback.*)?$"
)
# A request was refused or failed and the engine lives on, once the server is ready.
REQUEST = re.compile(
    r"Exception in ASGI application|Error in preprocessing prompt inputs"
    r"|Error in applying chat template|Unexpected error pre-processing request"
    r"|Invocation of \w+ method failed|Error with model error=|stream generator"
    r"|Error in (?:reasoning|tool|extracting|chat|completion|beam)|Failed to (?:parse|load image)"
    r"|Error (?:in|while) (?:processing|handling) request|Invalid HTTP request"
    r"|Error extracting|Error trying to (?:handle|parse)|Request \S+ failed|EngineGenerateError"
)
# Frames of the engine's own loop.
ENGINE_LOOP = re.compile(r":(?:run_engine_loop|engine_step|run_engine_core|run_busy_loop)$")
# What a tree says while it comes down, whatever the reason.
TEARDOWN = re.compile(
    r"^Exception ignored in|destroy_process_group\(\)|leaked (?:semaphore|shared_memory)"
    r"|TCPStore|recvValue failed|nanobind: leaked|no current event loop in thread"
    r"|Parent process exited|^\[shutdown\]|Error in sys\.excepthook|resource_tracker"
    r"|^BrokenPipeError|^ConnectionResetError: \[Errno 104\]|AttributeError: '\w+' object has no "
    r"attribute '(?:engine_core|llm_engine|model_executor|_task_queue|workers|_async_llm\w*|"
    r"resources|output_handler|shutdown|_finalizer|pidfd|_rpc|_manager_pid_fd|worker_monitor)'"
    r"|^FileNotFoundError: \[Errno 2\] No such file or directory: '/psm_"
    r"|^EOFError$|^KeyError: '/psm_|^TypeError: 'NoneType' object is not callable$"
)
# Errors and warnings that a healthy start prints.
HARMLESS = re.compile(
    r"Failed to import from vllm\._C|Found ulimit of|Unknown vLLM environment variable"
    r"|Custom allreduce is disabled|Cannot use FA version|Failed to load function from spec"
    r"|retrying \d+ of \d+|unauthenticated requests to the HF Hub|Error retrieving safetensors"
    r"|Error parsing config for|cuda(?:FFT|DNN|BLAS)|Unable to register cu|"
    r"computation_placer already registered|E0000 00:00|pip's dependency resolver"
    r"|Failed to retrieve filename from the offline Hub|Error getting (?:GPU|NVML)"
    r"|Invalid or missing `?config|Exception in thread QueueFeeder|Dumping (?:input|scheduler)"
    r"|dump_input\.py|Error loading plugin|Failed to load plugin|FlashInfer .* version"
)


def is_wrapper(message: str) -> bool:
    """Whether the message only says that something failed elsewhere."""
    return WRAPPER.search(message.split("\n", 1)[0][:CHARS]) is not None
