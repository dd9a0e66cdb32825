"""One line of vLLM's log in; the stage of the start that it announces out, or whether it is fatal.

Both questions are asked of every line while a server runs, so each is one search with a compiled
pattern for nearly all lines. A line is judged alone: an engine that dies during an ordinary
shutdown writes fatal lines too, and whoever asked for that shutdown knows to ignore them.
"""

from __future__ import annotations

import re

from airflow_provider_vllm.diagnosis.colour import plain
from airflow_provider_vllm.diagnosis.prefix import split_prefix

STAGES = ("import", "download", "load weights", "compile", "warm up")
"""The stages of a start in their usual order. vLLM may go back: to compile after the warm up began,
to load weights a second time for a draft model."""

# Every phrase is one that vLLM's logger or its progress bars print, from 0.4 up to 0.32.
_PHRASES: dict[str, tuple[str, ...]] = {
    "import": (
        r"vLLM API server version ",
        r"non-default args: ",
        r"Automatically detected platform ",
        r"Initializing an? (?:V1 )?LLM engine",
        r"Resolved architecture: ",
        r"█.*  version \d",
    ),
    "download": (
        r"Downloading shards: ",
        r"Downloading (?:Model from|\(…\)|bytes|weights)",
        r"Fetching \d+ files: ",
        r"Time spent downloading weights for ",
        r"(?<![\w.-])[\w.-]+\.(?:safetensors|bin|gguf|pt): +\d+%\|",
    ),
    "load weights": (
        r"Starting to load model ",
        r"Loading model from scratch",
        r"Loading (?:safetensors|pt|multi-thread|np) checkpoint shards: ",
        r"Loading safetensors using ",
        r"Loading drafter model",
        r"Using model weights format ",
        r"Prefetching checkpoint files",
        r"Loading (?:model )?weights took ",
    ),
    "compile": (
        r"Starting? (?:to compile|torch\.compile)",
        r"Start compiling ",
        r"Using cache directory: .* for vLLM's torch\.compile",
        r"Dynamo bytecode transform time: ",
        r"Compiling a graph for ",
        r"Compil(?:e|ing) (?:and warming up )?model ",
        r"Cach(?:e|ing) the graph (?:of|for) ",
        r"Directly load (?:the compiled graph|AOT compilation)",
        r"torch\.compile takes ",
        r"Warming up model for the compilation",
        r"saved AOT compiled function ",
    ),
    "warm up": (
        r"Memory profiling takes ",
        r"Initial profiling/warmup run took ",
        r"Available KV cache memory: ",
        r"(?:GPU|CPU|XPU|TPU|HPU) KV cache size: ",
        r"Capturing (?:CUDA|the model for CUDA|cudagraphs|ACL|HIP)",
        r"Profiling CUDA graph memory",
        r"Graph capturing finished ",
        r"# (?:GPU|CPU|cuda|hpu|xpu|tpu|neuron|rocm) blocks: ",
        r"Warming up done",
        r"Autotuning process starts",
        r"init engine \(profile",
        r"Starting vLLM (?:API )?server",
    ),
}
_STAGE = re.compile(
    "|".join(f"(?P<s{number}>{'|'.join(_PHRASES[stage])})" for number, stage in enumerate(STAGES))
)
# A logged prompt may hold any of the phrases above.
_REQUEST = re.compile(r"Received request |prompt: '|messages=\[")

_DEAD = (
    r"EngineCore failed to start",
    r"EngineCore encountered a fatal error",
    r"EngineCore encountered an issue\.",
    r"EngineCore hit an exception",
    r"EngineDeadError\b",
    r"(?:Runtime|Timeout)Error: (?:Engine core initialization|Timed out waiting for engine)",
    r"RuntimeError: Engine (?:process failed to start|loop has died)",
    r"RuntimeError\('Engine process \(pid \d+\) died",
    r"Worker(?:Proc)? failed to start",
    r"WorkerProc initialization failed",
    r"Worker proc \S+ died unexpectedly",
    r"Engine core proc \S+ died unexpectedly",
    r"RayWorkerProc rank=\S+ died unexpectedly",
    r"\[shutdown\] MPClient: engine core exited unexpectedly",
    r"Got fatal signal from worker processes",
    r"AsyncLLM output_handler failed",
    r"AsyncEngineDeadError\b",
    r"MQEngineDeadError\b",
    r"MQLLMEngine (?:is already dead|terminated)",
    r"Engine background task failed",
    r"Failed core proc\(s\)",
)
_MAYBE_FATAL = re.compile(
    r"EngineCore [ehf]|Engine\w*Dead|[Ee]ngine core|Engine [plb]|Worker|MQLLM|LLM out|Got f"
    r"|core proc"
)
_FATAL = re.compile(rf"(?:[a-z_][\w.]*\.)?(?:{'|'.join(_DEAD)})")


def stage_of(line: str) -> str | None:
    """The stage, one of STAGES, that this log line announces; None for a line that says nothing.

    Some lines report that a stage just ended ("Loading weights took"): they still name it.
    """
    if ' - "' in line and "INFO:" in line:  # an access line, as nearly all of a busy server's are
        return None
    line = plain(line)
    found = _STAGE.search(line)
    if found is None or found.lastgroup is None or _REQUEST.search(line, 0, found.start()):
        return None
    return STAGES[int(found.lastgroup[1:])]


def is_fatal(line: str) -> bool:
    """True for a line that says surely that the engine is dead or never came up.

    The words must be the message of a logger line or the head of an exception: the same words
    inside a logged prompt, an access line or a traceback's source line do not count.
    """
    if _MAYBE_FATAL.search(line) is None:
        return False
    return _FATAL.match(split_prefix(plain(line)).text) is not None
