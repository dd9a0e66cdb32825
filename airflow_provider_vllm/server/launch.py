"""Starting a server: a ServerSpec goes in, a ServerHandle comes out once its supervisor runs.

A start first removes what earlier starts left on this host, then supersedes earlier starts of the same
server. The supervisor is detached: it has no terminal, no pipe and no session in common with the task.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import airflow_provider_vllm
from airflow_provider_vllm.environment import allowed
from airflow_provider_vllm.exceptions import PreflightFailed, ServerError
from airflow_provider_vllm.server import gpus as gpu_list
from airflow_provider_vllm.server import nvml
from airflow_provider_vllm.server.handle import ServerHandle
from airflow_provider_vllm.server.order import Order, check_key, new_key, port_is_taken
from airflow_provider_vllm.server.processes import ProcessId
from airflow_provider_vllm.server.readiness import start_error
from airflow_provider_vllm.server.state import (
    ENDED_STATES,
    GenerationDir,
    ServerState,
    StateRoot,
    write_private,
)
from airflow_provider_vllm.server.stop import stop_generation, sweep
from airflow_provider_vllm.spec import ServerSpec

# A supervisor has its GPUs and vLLM within about a second, where the driver does not keep it waiting.
SUPERVISOR_S = 30.0 + nvml.TIMEOUT_S
# A killed task has about five seconds for all it does.
GIVE_UP_S = 3.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchOptions:
    """What the worker and the task add to a spec.

    `python` is the interpreter that has vLLM when the spec names none; `owner` the process with which the server
    ends; `key` the server's key when a connection gives it; `hf_token` the hub token.
    """

    python: str = sys.executable
    owner: ProcessId | None = None
    task: str | None = None
    key: str | None = field(default=None, repr=False)
    hf_token: str | None = field(default=None, repr=False)
    keep_failed_days: float = 7


def launch(
    spec: ServerSpec, server_id: str, root: StateRoot, options: LaunchOptions
) -> ServerHandle:
    """Start a server; returns as soon as it has its GPUs and vLLM runs, long before it is ready.

    Raises InvalidSpec, PreflightFailed, NoFreeGpu, StartFailed, ServerError; nothing is left behind then.
    """
    spec = resolve(spec)
    sweep(root, keep_failed_days=options.keep_failed_days)
    with root.server_lock(server_id):
        for earlier in root.generations(server_id):
            stop_generation(earlier, "superseded by a newer start")
        if spec.port and port_is_taken(spec.host, spec.port):
            raise _port_taken(spec)
        key = check_key(options.key) if options.key else new_key()
        # After the earlier starts are gone: what they held must not count as missing.
        python = check(spec, root, options)
        directory = root.new_generation(server_id)
        number, _, nonce = directory.path.name.partition("-")
        order = Order(server_id, int(number), nonce, spec, python, options.owner, options.task)
        write_private(directory.key_file, key)
        order.write(directory)
        current = _start_supervisor(directory, options)
    if current.state in ENDED_STATES:
        raise start_error(current, current.message or "it ended", str(directory.log_file), "")
    return handle_of(current, spec)


def resolve(spec: ServerSpec) -> ServerSpec:
    """The spec with its number of GPUs settled for this worker."""
    if spec.gpus is not None:
        return spec
    return ServerSpec.of({**spec.to_json(), "gpus": 1 if gpu_list.driver_present() else 0})


def check(spec: ServerSpec, root: StateRoot, options: LaunchOptions) -> str:
    """What can be known to fail before anything is started; returns the interpreter.

    Raises InvalidSpec, PreflightFailed.
    """

    from airflow_provider_vllm.server import preflight
    from airflow_provider_vllm.server.interpreter import require_vllm

    python = spec.python or options.python
    if not spec.command:
        python = require_vllm(python).path
    if spec.preflight != "off":
        found = preflight.check(
            spec,
            gpus=gpu_list.list_gpus(),
            state_root=root.path,
            environ=os.environ,
            python=python,
        )
        for finding in found:
            level = logging.ERROR if finding.level == "error" else logging.WARNING
            log.log(level, "preflight: %s", finding)
        preflight.enforce(found, spec.preflight)
    return python


def _port_taken(spec: ServerSpec) -> PreflightFailed:
    from airflow_provider_vllm.server.preflight import Finding, diagnosis_of

    what = f"ServerSpec.port {spec.port} on {spec.host} is taken by another process. "
    what += f"`ss -ltnp 'sport = :{spec.port}'` names it."
    fix = "End it, or use port=0 for a free port."
    found = Finding("port", "error", what, fix, passes=True)
    return PreflightFailed(f"{what} {fix}", diagnosis=diagnosis_of([found]).to_json())


def handle_of(current: ServerState, spec: ServerSpec) -> ServerHandle:
    return ServerHandle(
        server_id=current.server_id,
        generation=current.generation,
        nonce=current.nonce,
        host=current.host,
        base_url=current.base_url,
        control_url=current.control_url or "",
        model=current.model,
        spec=spec.public(),
    )


def _start_supervisor(directory: GenerationDir, options: LaunchOptions) -> ServerState:
    fd = os.open(
        directory.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "airflow_provider_vllm.server.supervisor", str(directory.path)],
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            env=_environ(options),
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(fd)
    try:
        return _first_state(process, directory)
    except BaseException:
        # Interrupted as well: the task is killed, and knows nothing of this server yet.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GIVE_UP_S)
        process.kill()
        raise


def _first_state(process: subprocess.Popen[bytes], directory: GenerationDir) -> ServerState:
    """The state once vLLM runs, or the start has ended. Raises ServerError."""
    deadline = time.monotonic() + SUPERVISOR_S
    while True:
        over = process.poll() is not None  # asked first: its last state is written before its end
        current = directory.read()
        if current is not None and (current.engine or current.settled):
            return current
        if over or time.monotonic() > deadline:
            tail = directory.supervisor_log.read_text(errors="replace")[-2000:]
            raise ServerError(
                f"The supervisor of {directory.server_dir.name} did not start (exit status "
                f"{process.poll()}). Its log is {directory.supervisor_log}:\n{tail}"
            )
        time.sleep(0.05)


def _environ(options: LaunchOptions) -> Mapping[str, str]:
    """The supervisor sees no more of the worker's environment than vLLM does."""
    package_parent = str(Path(airflow_provider_vllm.__file__).resolve().parent.parent)
    environ = allowed(os.environ)
    environ["PYTHONPATH"] = package_parent
    if options.hf_token:
        environ["HF_TOKEN"] = options.hf_token
    return environ
