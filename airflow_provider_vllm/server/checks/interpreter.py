"""Whether the interpreter has the vLLM that this server needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from airflow_provider_vllm.server.checks.finding import Finding, error, warning
from airflow_provider_vllm.server.gpus import Gpu
from airflow_provider_vllm.server.interpreter import Interpreter, NoAnswer, Unusable, inspect


def findings(
    python: str, gpus: Sequence[Gpu], environ: Mapping[str, str], *, timeout: float
) -> Iterator[Finding]:
    """What is wrong with `python` for a server on `gpus` (none: a CPU server)."""
    try:
        found = inspect(python, environ, timeout=timeout)
    except Unusable as exc:
        level = warning if isinstance(exc, NoAnswer) else error
        yield level("interpreter", exc.what, exc.fix)
        return
    if found.vllm_version is None:
        fix = "Set `python` of the spec, or `[vllm] python`, to the interpreter that has vLLM, or "
        install = f"install it there: `{found.path} -m pip install vllm`."
        yield error("interpreter", found.without_vllm, fix + install)
    else:
        yield from _build_findings(found, gpus)


def _build_findings(found: Interpreter, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    name = f"{found.distribution} {found.vllm_version}"
    if gpus and found.is_cpu_build:
        yield error(
            "build",
            f"{found.path} has the CPU build {name}, and the server gets {len(gpus)} GPU(s).",
            "Set `gpus=0`, or `python` to an interpreter with vLLM's GPU build.",
        )
    if not gpus and found.torch_cuda and not found.is_cpu_build:
        yield error(
            "build",
            f"{found.path} has the GPU build {name} (torch for CUDA {found.torch_cuda}), and the "
            "server gets no GPU.",
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
