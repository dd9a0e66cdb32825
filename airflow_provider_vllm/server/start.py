"""Starting a server until it is ready: a ServerSpec goes in, a Running server or an error comes out.

Makes `spec.start_attempts` attempts with a growing pause between them. Each attempt is a start of its own
with its own directory, so the evidence of the failed ones stays. Whatever interrupts the wait, an
exception of a signal handler included, ends the server that was being started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from airflow_provider_vllm.environment import allowed
from airflow_provider_vllm.exceptions import ServerError, StartFailed, TaskInterrupted
from airflow_provider_vllm.server import hub
from airflow_provider_vllm.server.checks.model import hub_cache
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.control import ControlClient, token_for
from airflow_provider_vllm.server.handle import ServerHandle
from airflow_provider_vllm.server.interpreter import require_vllm
from airflow_provider_vllm.server.launch import LaunchOptions, handle_of, launch, resolve
from airflow_provider_vllm.server.readiness import start_error, wait_until_ready
from airflow_provider_vllm.server.state import GenerationDir, ServerState, StateRoot
from airflow_provider_vllm.server.stop import stop_generation
from airflow_provider_vllm.spec import ServerSpec

BACK_OFF_S = 5.0
# The supervisor enforces startup_timeout itself; beyond this much more it is not to be trusted.
MARGIN_S = 60.0
TAIL_BYTES = 1500


@dataclass(frozen=True)
class Running:
    """A server of this host that is ready, with the key to it."""

    handle: ServerHandle
    state: ServerState
    directory: GenerationDir

    @property
    def key(self) -> str:
        return self.directory.key() or ""

    @property
    def control(self) -> ControlClient:
        return ControlClient(self.handle.control_url, token_for(self.key, self.handle.nonce))

    def stop(self, reason: str) -> None:
        """Stop this very start. Raises StopFailed."""
        stop_generation(self.directory, reason)


def start(
    spec: ServerSpec,
    server_id: str,
    root: StateRoot,
    options: LaunchOptions,
    *,
    report: Callable[[str], None],
    apply_remedy: bool = False,
    on_launch: Callable[[ServerHandle, GenerationDir], None] = lambda handle, directory: None,
) -> Running:
    """Start a server and wait until it is ready.

    `report` gets a line at each stage; `on_launch` is told of each attempt as soon as it runs. With
    `apply_remedy` the one engine argument that a diagnosis names is changed once for the next attempt.
    Raises StartFailed after the last attempt, earlier when no retry of the launch can help;
    NoFreeGpu, InvalidSpec and PreflightFailed at once.
    """
    spec = resolve(spec)
    remedied = not apply_remedy
    attempt = 0
    while True:
        attempt += 1
        report(
            f"starting {spec.served_model_name} (launch {attempt} of {spec.start_attempts} in this try)"
        )
        try:
            return start_once(spec, server_id, root, options, report=report, on_launch=on_launch)
        except StartFailed as exc:
            diagnosis = exc.diagnosis or {}
            remedy = None if remedied else diagnosis.get("remedy")
            hopeless = diagnosis.get("retry", {}).get("launch") is False and not remedy
            if attempt >= spec.start_attempts or hopeless:
                raise
            pause = BACK_OFF_S * 2 ** (attempt - 1)
            report(f"attempt {attempt} failed:\n{exc}")
            if remedy:
                remedied = True
                report(f"launching again with {remedy} instead of {_current(spec, remedy)}")
                spec = ServerSpec.of(
                    {
                        **spec.to_json(),
                        "engine_args": {**_without(spec.engine_args, remedy), **remedy},
                    }
                )
            report(f"next attempt in {pause:g} s")
            time.sleep(pause)


def start_once(
    spec: ServerSpec,
    server_id: str,
    root: StateRoot,
    options: LaunchOptions,
    *,
    report: Callable[[str], None],
    on_launch: Callable[[ServerHandle, GenerationDir], None] = lambda handle, directory: None,
) -> Running:
    """One attempt. Raises StartFailed, NoFreeGpu, InvalidSpec, PreflightFailed."""
    fetch_model(spec, root, options, report=report)
    handle = launch(spec, server_id, root, options)
    directory = handle.directory(root)
    if directory is None:
        raise ServerError(
            f"The directory of {server_id} vanished from {root.path} during its start."
        )
    on_launch(handle, directory)
    report(f"server {server_id}, log {directory.log_file}")
    try:
        return wait(handle, directory, spec, report=report)
    except TaskInterrupted:
        raise  # whoever interrupted has told it to end; a killed task has no time to wait for that
    except BaseException:
        stop_generation(directory, "its start did not succeed")
        raise


def fetch_model(
    spec: ServerSpec, root: StateRoot, options: LaunchOptions, *, report: Callable[[str], None]
) -> None:
    """Download a hub model that the cache lacks, once for all tasks of this host that ask for it.

    Before the launch, so that no GPU waits for it. Raises DownloadFailed.
    """
    environ = {**allowed(os.environ), **spec.env}
    if options.hf_token:
        environ["HF_TOKEN"] = options.hf_token
    if spec.command or not hub.needs_download(spec.model, spec.engine_args, environ):
        return
    args = Options.of(spec.engine_args)
    hub.download_once(
        spec.model,
        cache_dir=hub_cache(args, environ),
        lock_dir=root.locks,
        environ=environ,
        python=require_vllm(spec.python or options.python).path,
        revision=str(args.get("revision") or "main"),
        load_format=str(args.get("load_format") or "auto"),
        on_progress=lambda progress: report(str(progress)),
        timeout_s=spec.startup_timeout,
    )


def wait(
    handle: ServerHandle,
    directory: GenerationDir,
    spec: ServerSpec,
    *,
    report: Callable[[str], None],
) -> Running:
    """Wait until a launched server of this host is ready. Raises StartFailed, NoFreeGpu."""

    def look() -> tuple[ServerState, bool]:
        current = directory.read()
        if current is None:
            raise StartFailed(
                f"{directory.state_file} is gone: somebody removed the server's directory."
            )
        return current, current.supervisor_alive

    current = wait_until_ready(
        look,
        timeout=spec.startup_timeout + MARGIN_S,
        report=report,
        fail=lambda state, message: failure(directory, state, message),
    )
    return Running(handle_of(current, spec), current, directory)


def failure(directory: GenerationDir, current: ServerState, message: str) -> ServerError:
    """The error of a failed start of this host."""
    return start_error(current, message, str(directory.log_file), tail_of(directory))


def tail_of(directory: GenerationDir) -> str:
    """The end of vllm.log, or of the supervisor's when vLLM wrote nothing."""
    for path in (directory.log_file, directory.supervisor_log):
        try:
            with open(path, "rb") as log:
                log.seek(max(0, log.seek(0, 2) - TAIL_BYTES))
                text = log.read().decode(errors="replace").strip()
        except FileNotFoundError:
            continue
        if text:
            return text
    return ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _current(spec: ServerSpec, remedy: dict[str, object]) -> dict[str, object]:
    names = {_plain(name) for name in remedy}
    return {name: value for name, value in spec.engine_args.items() if _plain(name) in names}


def _without(engine_args: object, remedy: dict[str, object]) -> dict[str, object]:
    names = {_plain(name) for name in remedy}
    assert hasattr(engine_args, "items")
    return {name: value for name, value in engine_args.items() if _plain(name) not in names}
