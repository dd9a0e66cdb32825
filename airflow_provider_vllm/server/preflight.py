"""What can be known to fail before weights are loaded: a ServerSpec in, findings out.

A wrong path, a damaged shard or a model that cannot fit costs minutes when vLLM finds it. Here it
costs under two seconds, and the finding names the setting to change.

- Checks have no effects: no file is written, no port kept, no network asked, no GPU touched.
- "error" means that the start cannot succeed. What is only likely is a "warning".
- What vLLM says clearly within its first ten seconds is left to vLLM.
- A check never stops a start by failing itself: a file of an odd shape or a disk that hangs is a warning that
  names the check.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from airflow_provider_vllm.diagnosis.rule import Diagnosis
from airflow_provider_vllm.environment import allowed
from airflow_provider_vllm.exceptions import InsecurePath, PreflightFailed
from airflow_provider_vllm.server import gpu_locks, host_memory
from airflow_provider_vllm.server.checks import context, host, interpreter, lora, memory, model
from airflow_provider_vllm.server.checks.finding import Finding, error, warning
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.gpus import NONE_LISTED_FIX, Gpu, Shortage, choose, none_listed
from airflow_provider_vllm.spec import ServerSpec

__all__ = ["Finding", "check", "enforce"]

# Beyond the budget: a check that keeps to it needs a moment to say so.
GRACE_S = 0.3

# The diagnosis' group of a check; a worker's own matters are "environment".
_GROUPS = {
    **dict.fromkeys(("memory", "gpu-weights", "context-length", "shm"), "capacity"),
    **dict.fromkeys(
        ("model-path", "model-config", "weights", "max-model-len", "gpu-count"), "model_config"
    ),
    "model-cache": "network_auth",
    "lora": "request",
}

_OF_THE_DEVICE = ("build", "memory", "context-length")

log = logging.getLogger(__name__)


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
    the whole: what a slow disk or interpreter does not answer until then is a warning.
    """
    deadline = time.monotonic() + budget_s
    child = {**allowed(environ), **spec.env}
    chosen: list[Gpu] = []
    gpu_findings = list(_safely("gpus", lambda: _gpu_findings(spec, gpus, state_root, chosen)))
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "interpreter": lambda: _command_findings(spec, chosen, child, python, budget_s),
        "state-root": lambda: host.state_root_findings(state_root),
        "port": lambda: host.port_findings(spec.host, spec.port),
        "limits": lambda: host.limit_findings(Options.of(spec.engine_args).workers),
        "model": lambda: _model_findings(spec, chosen, child, deadline),
    }
    others = _together(checks, deadline + GRACE_S)
    if any(finding.level == "error" for finding in gpu_findings):
        # Without its GPUs it was looked at as a server on the CPU, which it is not.
        others = (finding for finding in others if finding.check not in _OF_THE_DEVICE)
    found = [*gpu_findings, *others]
    return tuple(sorted(found, key=lambda finding: finding.level != "error"))


def _together(
    checks: Mapping[str, Callable[[], Iterable[Finding]]], deadline: float
) -> Iterator[Finding]:
    """What the checks find, side by side until `deadline`: one that hangs costs the others nothing."""
    found: dict[str, list[Finding]] = {name: [] for name in checks}
    threads = {
        name: threading.Thread(target=found[name].extend, args=(_safely(name, check),), daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        yield from list(found[name])
        if thread.is_alive():
            what = "This check did not end in time: what it reads hangs, or is very slow."
            yield warning(name, what, "Look at the disks of this worker (mount, dmesg).")


def _safely(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check finds; where something makes it fail itself, a warning that says so."""
    try:
        yield from check()
    except Exception as exc:
        log.debug("the check %s failed", name, exc_info=True)
        what = f"This check met something odd ({type(exc).__name__}: {str(exc)[:200]})."
        yield warning(name, what, "See whether that is right; vLLM decides whether it can use it.")


def enforce(findings: Sequence[Finding], mode: str) -> None:
    """Raises PreflightFailed with every error among `findings` where `mode` is "fail"."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors and mode == "fail":
        what = "\n".join(f"  {finding}" for finding in errors)
        raise PreflightFailed(
            f"vLLM was not started, because it would fail:\n{what}\n"
            "Change what is named above; preflight='warn' starts it all the same.",
            diagnosis=diagnosis_of(errors).to_json(),
        )


def diagnosis_of(errors: Sequence[Finding]) -> Diagnosis:
    """Findings that keep a server from starting as a Diagnosis: of the first one that will be there at
    the next try too, else of the first one."""
    lasting = [finding for finding in errors if not finding.passes]
    first = (lasting or errors)[0]
    return Diagnosis(
        verdict="failed",
        group=_GROUPS.get(first.check, "environment"),
        cause=f"preflight_{first.check.replace('-', '_')}",
        explanation=first.message,
        first_action=first.fix,
        retry_launch=not lasting,
        confidence=0.95,
    )


def _gpu_findings(
    spec: ServerSpec, gpus: Sequence[Gpu], state_root: Path, chosen: list[Gpu]
) -> Iterator[Finding]:
    """Puts the GPUs that the server would get now into `chosen`, or, where it has to wait, some that it
    may get."""
    asked = spec.gpus if spec.gpus is not None else min(1, len(gpus))
    wanted = asked if isinstance(asked, tuple) else ()
    count = len(wanted) if isinstance(asked, tuple) else asked
    try:
        locked = gpu_locks.locked(state_root / "locks")
    except InsecurePath as exc:
        yield error("state-root", str(exc), "Set `[vllm] state_root` to another folder.")
        return
    choice = choose(gpus, count, locked=locked, wanted=wanted)
    if isinstance(choice, Shortage) and choice.waiting_helps:
        choice = choose(gpus, count, wanted=wanted)
    if isinstance(choice, Shortage):
        if gpus:
            yield error("gpu-count", str(choice), "Set `gpus` to what this worker has.")
        else:
            yield error("gpus", none_listed(count), NONE_LISTED_FIX)
        return
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    chosen += [by_uuid[uuid] for uuid in choice]


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
    found: model.Model | None = None

    def look_up() -> Iterator[Finding]:
        nonlocal found
        seen, findings = model.look_up(spec.model, options, child)
        yield from findings
        if seen is None and not findings and model.is_hub_id(spec.model):
            yield from _download_findings(spec.model, options, child)
        found = seen

    def weights(seen: model.Model) -> Iterator[Finding]:
        nonlocal found
        offline = model.is_offline(child)
        found, findings = model.read_weights(seen, options, offline=offline, deadline=deadline)
        yield from findings

    yield from _safely("model", look_up)
    if found is not None:
        yield from _safely("weights", partial(weights, found))
    base = found.text_config if found else None
    for name, path in (spec.lora_modules or {}).items():
        yield from _safely("lora", partial(lora.findings, {name: path}, options, base))
    yield from _safely("memory", lambda: _memory_findings(found, options, gpus, child))
    yield from _safely("shm", lambda: host.shm_findings(options.workers))


def _memory_findings(
    found: model.Model | None, options: Options, gpus: Sequence[Gpu], child: Mapping[str, str]
) -> Iterator[Finding]:
    if found:
        yield from context.findings(found, options, child)
    available, total = host_memory.available_and_total()
    if gpus:
        yield from memory.gpu_findings(found, options, gpus)
        yield from memory.offload_findings(options, available, total)
    else:
        yield from memory.cpu_findings(found, options, child, available, total)


def _download_findings(name: str, options: Options, child: Mapping[str, str]) -> Iterator[Finding]:
    cache = model.hub_cache(options, child)
    fix = "Set `env={'HF_HOME': ...}` or `download_dir` to a folder that can be written."
    yield from host.writable_findings("hub-cache", cache, fix)
    yield from memory.download_findings(name, host.free_disk(cache), cache)
