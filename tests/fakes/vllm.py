"""A process that behaves like `vllm serve`, well or badly, in a fraction of a second.

    python tests/fakes/vllm.py --port N [--model NAME] [--plan JSON]

It starts an "engine" and a "worker" as processes of their own below it, logs the stages of a start in the
shape of vLLM 0.32, holds a /dev/shm segment and a socket that it never removes, then serves
`tests/fakes/endpoint.py`. The plan says what goes wrong:

    start_s            seconds until it is ready (0.2)
    fail_at            stage at which it fails: "import", "load weights", "warm up"
    fail_line          the engine's error line then; exit_status its status (1)
    fail_times         fail only in the first N starts; counted in the file `counter`
    never_ready        it stays in "load weights"
    ignore_term        SIGTERM does nothing
    port_taken_times   in the first N starts it fails like vLLM on a taken port (uses `counter`)
    stranger           "keyless": answers without its key; "other": with another key; "model": another model
    die_after          seconds after ready until it kills its engine; die_how: "engine", "exit", "kill"
    unhealthy_after    seconds after ready until /health says 503
    orphan_session     the worker makes a session of its own
    daemon             a process below it leaves the session and closes its streams; the file to write its pid to
    rows               fields of endpoint.Behaviour
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STAGES = {
    "import": "[api_utils.py:347] vLLM API server version 0.32.0",
    "load weights": "[gpu_model_runner.py:5012] Starting to load model tiny...",
    "warm up": "[core.py:300] init engine (profile, create kv cache, warmup model) took 0.1 seconds",
}


def log(process: str, text: str, level: str = "INFO") -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(f"({process} pid={os.getpid()}) {level} {stamp} {text}", flush=True)


def attempt_number(counter: str | None) -> int:
    """Which start this is, from 1 on."""
    if counter is None:
        return 1
    with open(counter, "ab+") as file:
        file.write(b".")
        return file.tell()


def leave_socket() -> None:
    """As the sockets between vLLM's processes: one that was killed leaves them behind."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{tempfile.gettempdir()}/{uuid.uuid4()}")


def sleeper(name: str, new_session: bool) -> subprocess.Popen[bytes]:
    """A process that only lives, as EngineCore and Worker do for our purposes."""
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(3600)"
    return subprocess.Popen([sys.executable, "-c", code, name], start_new_session=new_session)


def daemon(pid_file: str) -> None:
    """A process that nothing but its environment ties to us, as some compile helpers are."""
    code = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.closerange(0, 3)\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "time.sleep(3600)"
    )
    subprocess.run([sys.executable, "-c", code, pid_file], start_new_session=True, check=True)


def fail(stage: str, plan: dict) -> None:
    line = plan.get("fail_line", "RuntimeError: the fake was told to fail")
    log("EngineCore", "[core.py:1231] EngineCore failed to start.", "ERROR")
    log("EngineCore", "[core.py:1231] Traceback (most recent call last):", "ERROR")
    log(
        "EngineCore",
        f'[core.py:1231]   File "core.py", line 1, in {stage.replace(" ", "_")}',
        "ERROR",
    )
    log("EngineCore", f"[core.py:1231] {line}", "ERROR")
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(plan.get("exit_status", 1))


def start_up(plan: dict, attempt: int) -> None:
    """Go through the stages; exits where the plan says so."""
    if attempt <= plan.get("port_taken_times", 0):
        print("OSError: [Errno 98] Address already in use", flush=True)
        sys.exit(1)
    failing = plan.get("fail_at") if attempt <= plan.get("fail_times", 10**9) else None
    for stage, text in STAGES.items():
        log("APIServer" if stage == "import" else "EngineCore", text)
        time.sleep(plan.get("start_s", 0.2) / len(STAGES))
        if stage == failing:
            fail(stage, plan)
        if stage == "load weights" and plan.get("never_ready"):
            while True:
                time.sleep(3600)


async def serve(
    port: int,
    model: str,
    plan: dict,
    engine: subprocess.Popen[bytes],
    worker: subprocess.Popen[bytes],
) -> None:
    from aiohttp import web

    from tests.fakes.endpoint import BEHAVIOUR, Behaviour, build_app

    stranger = plan.get("stranger", "")
    own = os.environ.get("VLLM_API_KEY")
    key = {"keyless": None, "other": "another-key"}.get(stranger, own)
    behaviour = Behaviour(
        models=("another-model",) if stranger == "model" else (model,),
        api_key=key,
        on_die=lambda: end("engine", engine),
        **plan.get("rows", {}),
    )
    app = build_app(behaviour)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    ready = time.monotonic()
    ending = asyncio.Event()
    if not plan.get("ignore_term"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    while not ending.is_set():
        age = time.monotonic() - ready
        if age > plan.get("die_after", 10**9):
            end(plan.get("die_how", "engine"), engine)
        if age > plan.get("unhealthy_after", 10**9) or engine.poll() is not None:
            app[BEHAVIOUR].health = 503
        if engine.poll() is not None and age > 0.5:
            log("APIServer", "[async_llm.py:906] AsyncLLM output_handler failed.", "ERROR")
            await asyncio.sleep(1.0)
            os._exit(0)
        with_timeout = asyncio.wait_for(ending.wait(), 0.1)
        try:
            await with_timeout
        except asyncio.TimeoutError:
            continue
    # As vLLM: while the handler is still there. Where guard and supervisor die, the kernel sends SIGTERM for each,
    # and the second would end this process before its engine.
    engine.kill()
    worker.kill()


def end(how: str, engine: subprocess.Popen[bytes]) -> None:
    if how == "engine":
        engine.kill()
    elif how == "exit":
        os._exit(7)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--plan", default="{}")
    args = parser.parse_args()
    plan = json.loads(args.plan)
    if plan.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # As vLLM's message queues: a tracker process removes it when this one is gone, killed or not. It runs before there
    # is something to remove, or a signal in between would leave it.
    resource_tracker.ensure_running()
    segment = shared_memory.SharedMemory(create=True, size=4096)
    leave_socket()
    engine = sleeper("engine", False)
    worker = sleeper("worker", bool(plan.get("orphan_session")))
    if plan.get("daemon"):
        daemon(plan["daemon"])
    try:
        start_up(plan, attempt_number(plan.get("counter")))
        asyncio.run(serve(args.port, args.model, plan, engine, worker))
    finally:
        engine.kill()
        worker.kill()
        segment.close()
        segment.unlink()


if __name__ == "__main__":
    main()
