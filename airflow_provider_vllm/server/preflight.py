"""What can be known to fail before weights are loaded: a ServerSpec in, findings out.

A wrong path, a damaged shard or a model that cannot fit costs minutes when vLLM finds it. Here it
costs under two seconds, and the finding names the setting to change.

- Checks have no effects: no file is written, no port kept, no network asked, no GPU touched.
- "error" means that the start cannot succeed. What is only likely is a "warning".
- What vLLM says clearly within its first ten seconds is left to vLLM.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from airflow_provider_vllm.environment import allowed
from airflow_provider_vllm.exceptions import InsecurePath, PreflightFailed
from airflow_provider_vllm.server import gpu_locks, host_memory
from airflow_provider_vllm.server.checks import host, interpreter, lora, memory, model
from airflow_provider_vllm.server.checks.finding import Finding, error
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.gpus import Gpu, Shortage, choose, driver_status
from airflow_provider_vllm.spec import ServerSpec

__all__ = ["Finding", "check", "enforce"]


def check(
    spec: ServerSpec,
    *,
    gpus: Sequence[Gpu],
    state_root: Path,
    environ: Mapping[str, str],
    python: str | None = None,
    budget_s: float = 1.5,
) -> tuple[Finding, ...]:
    """Everything that is wrong with starting `spec` here, errors first.

    `gpus`: this worker's (`gpus.list_gpus()`). `environ`: its environment; what vLLM would see of
    it is what is checked. `python`: the interpreter where the spec names none. `budget_s` bounds
    the two checks that read much or wait: a slow disk gives a warning, never a long wait.
    """
    deadline = time.monotonic() + budget_s
    child = {**allowed(environ), **spec.env}
    gpus, gpu_findings = _gpus_of(spec, gpus, state_root)
    found = [
        *gpu_findings,
        *_command_findings(spec, gpus, child, python, budget_s),
        *host.state_root_findings(state_root),
        *host.port_findings(spec.host, spec.port),
        *host.limit_findings(),
        *_model_findings(spec, gpus, child, deadline),
    ]
    return tuple(sorted(found, key=lambda finding: finding.level != "error"))


def enforce(findings: Sequence[Finding], mode: str) -> None:
    """Raises PreflightFailed with every error among `findings` where `mode` is "fail"."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors and mode == "fail":
        what = "\n".join(f"  {finding}" for finding in errors)
        raise PreflightFailed(
            f"vLLM was not started: {len(errors)} thing(s) would make it fail.\n{what}\n"
            "Change what is named above; preflight='warn' starts it all the same."
        )


def _gpus_of(
    spec: ServerSpec, gpus: Sequence[Gpu], state_root: Path
) -> tuple[Sequence[Gpu], list[Finding]]:
    """The GPUs that the server would get now, or, where it has to wait, some that it may get."""
    asked = spec.gpus if spec.gpus is not None else min(1, len(gpus))
    wanted = asked if isinstance(asked, tuple) else ()
    count = len(wanted) if isinstance(asked, tuple) else asked
    try:
        locked = gpu_locks.locked(state_root / "locks")
    except InsecurePath as exc:
        return (), [error("state-root", str(exc), "Set `[vllm] state_root` to another folder.")]
    choice = choose(gpus, count, locked=locked, wanted=wanted)
    if isinstance(choice, Shortage) and choice.waiting_helps:
        choice = choose(gpus, count, wanted=wanted)
    if isinstance(choice, Shortage):
        message = str(choice) if gpus else f"{count} GPU(s) asked for: {driver_status()}."
        return (), [error("gpu-count", message, "Set `gpus` to what this worker has.")]
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    return [by_uuid[uuid] for uuid in choice], []


def _command_findings(
    spec: ServerSpec,
    gpus: Sequence[Gpu],
    child: Mapping[str, str],
    python: str | None,
    timeout: float,
) -> Iterator[Finding]:
    if spec.command is None:
        chosen = spec.python or python or sys.executable
        yield from interpreter.findings(chosen, gpus, child, timeout=timeout)
    elif shutil.which(spec.command[0], path=child.get("PATH")) is None:
        yield error(
            "command",
            f"{spec.command[0]} is not a program on this worker.",
            "Correct the first word of `command`, or give its full path.",
        )


def _model_findings(
    spec: ServerSpec, gpus: Sequence[Gpu], child: Mapping[str, str], deadline: float
) -> Iterator[Finding]:
    options = Options.of(spec.engine_args)
    found, findings = model.look_up(spec.model, options, child)
    yield from findings
    if found is None and not findings and model.is_hub_id(spec.model):
        yield from _download_findings(spec.model, options, child)
    if found is not None:
        offline = model.is_offline(child)
        found, findings = model.read_weights(found, options, offline=offline, deadline=deadline)
        yield from findings
    yield from lora.findings(spec.lora_modules, options, found.text_config if found else None)
    available, total = host_memory.available_and_total()
    if gpus:
        yield from memory.gpu_findings(found, options, gpus)
        yield from memory.offload_findings(options, available)
    else:
        yield from memory.cpu_findings(found, options, child, available, total)
    yield from host.shm_findings(options.workers)


def _download_findings(name: str, options: Options, child: Mapping[str, str]) -> Iterator[Finding]:
    cache = model.hub_cache(options, child)
    fix = "Set `env={'HF_HOME': ...}` or `download_dir` to a folder that can be written."
    yield from host.writable_findings("hub-cache", cache, fix)
    yield from memory.download_findings(name, host.free_disk(cache), cache)
