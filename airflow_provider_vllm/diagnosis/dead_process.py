"""Rules: a process was ended, or ended itself, without a Python error of its own."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

from airflow_provider_vllm.diagnosis.rule import Rule

INTERRUPTS: tuple[Rule, ...] = (
    Rule(
        id="killed_by_scheduler",
        group="dead_process",
        pattern=r"slurmstepd: error: .*(?:DUE TO TIME LIMIT|CANCELLED AT)|DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)|PBS: job killed|TERM_RUNLIMIT|KeyboardInterrupt: terminated|^(?:Hangup|Terminated)$",
        explanation="The batch system or the platform ended the job; vLLM did nothing wrong.",
        first_action="Ask for a longer time limit, or send fewer requests per job.",
        launch=True,
        request=True,
        native=True,
        interrupts=True,
        examples=(
            "slurmstepd: error: *** JOB 4242 ON gpu-07 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***",
        ),
        near_misses=("slurmstepd: error: Detected 1 oom_kill event in StepId=4242.batch.",),
    ),
    Rule(
        id="sigterm_received",
        group="dead_process",
        pattern=r"\*\*\* SIGTERM received at time=",
        explanation="Something outside sent SIGTERM to a process of the server; vLLM did nothing wrong.",
        first_action="Find out who ended it (a time limit, a pod's eviction, Ray), then start it again.",
        launch=True,
        request=True,
        native=True,
        victim=True,
        interrupts=True,
        confidence=0.75,
        examples=("(EngineCore pid=7) *** SIGTERM received at time=1764590400 on cpu 3 ***",),
    ),
    Rule(
        id="interrupted",
        group="dead_process",
        pattern=r"^KeyboardInterrupt\b",
        explanation="Somebody pressed Ctrl-C, or a lost session sent SIGINT; vLLM did nothing wrong.",
        first_action="Start it again, detached from the terminal.",
        launch=True,
        request=True,
        interrupts=True,
        examples=(
            "Traceback (most recent call last):\n"
            '  File "vllm/entrypoints/openai/api_server.py", line 500, in run_server\n'
            "KeyboardInterrupt",
        ),
    ),
)

RULES: tuple[Rule, ...] = (
    Rule(
        id="host_oom_killed",
        group="dead_process",
        pattern=r"oom[-_]kill(?:er)?\b|Out of memory: Killed process|OOMKilled|Detected \d+ oom.kill event|Memory cgroup out of memory|workers? (?:was|were) killed due to (?:the node running low on )?memory|ray\.exceptions\.OutOfMemoryError|died due to signal 9|is killed by signal: Killed|Killed signal terminated program",
        explanation="The host or the container ran out of memory and a process was killed.",
        first_action="Give the server more host memory (or raise the container's limit).",
        launch=False,
        request=None,
        native=True,
        examples=(
            "slurmstepd: error: Detected 1 oom_kill event in StepId=4242.batch. Some of the step tasks have been OOM Killed.",
            "[ 9183.1] Out of memory: Killed process 4711 (VLLM::EngineCor) total-vm:91234kB, anon-rss:61234kB",
        ),
        near_misses=(
            "(EngineCore pid=104) ERROR 05-05 12:36:59 [core.py:1129] torch.OutOfMemoryError: CUDA out of memory.",
        ),
    ),
    Rule(
        id="native_crash",
        group="dead_process",
        pattern=r"\*\*\* SIG(?:SEGV|ABRT|BUS|FPE|ILL)\b.* received|Fatal Python error: (?P<what>Segmentation fault|Aborted|Bus error|Illegal instruction)|^(?:free\(\): |malloc\(\): |double free or corruption|munmap_chunk\(\)|corrupted (?:size|double)|\*\*\* stack smashing)|terminate called (?:after throwing|without an active)|(?:Segmentation fault|Bus error|Aborted|Illegal instruction|Floating point exception)\s+\(core dumped\)|!!!!!!! Segfault encountered|Caught signal 11",
        explanation="Native code crashed a process (segmentation fault, abort or corrupted heap).",
        first_action="Read the frames under this line: the first library that is not Python's names the owner; then start once with enforce_eager.",
        launch=True,
        request=None,
        native=True,
        victim=True,
        confidence=0.85,
        examples=(
            "!!!!!!! Segfault encountered !!!!!!!",
            "*** SIGSEGV received at time=1735689600 on cpu 12 ***",
            "Fatal Python error: Segmentation fault",
            "free(): double free detected in tcache 2",
            "./serve.sh: line 3:    31 Illegal instruction     (core dumped) vllm serve /data/m",
        ),
        near_misses=("Process finished with exit code 0",),
    ),
    Rule(
        id="startup_timeout",
        group="dead_process",
        pattern=r"Timed out waiting for engine (?:core )?processes to start|Timed out waiting for engines? to send initial message|Did not receive response from front-end process within|did not (?:become ready|start) within \d+|Timeout waiting for .{0,30}engine.{0,20}ready|RPCServer process died before responding to readiness|MQLLMEngine failed to (?:start|respond)|Timed out waiting for the server to become ready|Server failed to start in time",
        explanation="The engine did not finish its start within the time-out; no process reported an error.",
        first_action="Raise VLLM_ENGINE_READY_TIMEOUT_S if the load still moved; if not, start once with VLLM_LOGGING_LEVEL=DEBUG.",
        launch=True,
        request=None,
        victim=True,
        confidence=0.8,
        examples=(
            "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight loading for large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S).",
        ),
    ),
    Rule(
        id="engine_iteration_timeout",
        group="communication",
        pattern=r"Engine iteration timed out|No heartbeat received from MQLLMEngine",
        explanation="One step of the engine did not come back: a worker or the GPU hangs.",
        first_action="Start again; if it hangs again, take a py-spy dump of each worker before ending it.",
        launch=True,
        request=True,
        confidence=0.85,
        examples=(
            "ERROR 07-13 15:07:34 async_llm_engine.py:616] Engine iteration timed out. This should never happen!",
        ),
    ),
    Rule(
        id="engine_step_timeout",
        group="communication",
        pattern=r"^(?:asyncio\.exceptions\.)?TimeoutError$",
        frames=r"run_engine_loop|engine_step",
        explanation="One step of the engine did not come back in time: a worker or the GPU hangs.",
        first_action="Start again; if it hangs again, take a py-spy dump of each worker before ending it.",
        launch=True,
        request=True,
        confidence=0.8,
        examples=(
            "Traceback (most recent call last):\n"
            '  File "vllm/engine/async_llm_engine.py", line 603, in run_engine_loop\n'
            "asyncio.exceptions.TimeoutError",
        ),
    ),
    Rule(
        id="ray_actor_lost",
        group="dead_process",
        pattern=r"ray\.exceptions\.(?:RayActorError|ActorDiedError|WorkerCrashedError|ActorUnavailableError|NodeDiedError|OwnerDiedError)|\(raylet\) A worker died or was killed|The actor died unexpectedly before finishing this task|The actor is dead because",
        explanation="A Ray actor of the engine died, and Ray does not know why.",
        first_action="Look for that actor's own last lines (ray logs) and for oom-kill lines on its node.",
        launch=True,
        request=True,
        native=True,
        victim=True,
        confidence=0.7,
        examples=(
            "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        ),
    ),
)
