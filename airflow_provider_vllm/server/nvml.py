"""The NVIDIA driver's view of this host, read through `pynvml`; nothing of it is decided here.

What enters is NVML; what leaves is a `Reading`: `Gpu` values and sentences about what could not be read.

- Reading never raises: a host without a driver is a normal host.
- NVML is asked in a process of its own. A wedged driver does not answer, and then no signal ends the one that asks;
  here it is left behind, and what it was asked for goes on without it. It sees our modules, and of our environment
  only what steers Python and the driver's library: it may stay for days.
- `pynvml` is imported inside functions only: DAG files are parsed on hosts without a GPU.

    python -m airflow_provider_vllm.server.nvml     the reading as JSON
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_provider_vllm.server import host_memory

LIBRARY = "libnvidia-ml.so.1"
TIMEOUT_S = 30.0  # without persistence mode the driver wakes each GPU for it, seconds for one
# One start asks several times: a driver that did not answer keeps only the first of them waiting.
AGAIN_S = 60.0
_SEEN = ("PATH", "HOME", "LD_", "PYTHON", "CUDA_", "NVIDIA_")
_asking = threading.Lock()
_asker: subprocess.Popen[str] | None = None  # the last one
_not_before = 0.0


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU: `pid` in the host's numbering, also when this runs in a container."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One device that CUDA can be given: a whole GPU, or one MIG device of a partitioned GPU.

    `index` is NVML's (PCI bus order); a MIG device carries the index of its GPU. `total_bytes` is
    what programs can allocate, without the driver's own reserve, so free + used = total. A GPU that
    shares the host's memory (no memory of its own in NVML) reports the host's.
    """

    uuid: str
    index: int
    name: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    compute_capability: tuple[int, int] | None = None
    parent_uuid: str | None = None

    @property
    def is_mig(self) -> bool:
        return self.parent_uuid is not None


@dataclass(frozen=True)
class Reading:
    """Every GPU and MIG device of the host, one sentence for each thing that went wrong, and the driver's versions.

    `answered` is False where there is a driver that does not answer, or that breaks what asks it.
    """

    gpus: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()
    driver: str = ""
    answered: bool = True


def read(timeout: float | None = None) -> Reading:
    """What NVML says within `timeout` seconds, by default `TIMEOUT_S`. Never raises."""
    timeout = TIMEOUT_S if timeout is None else timeout
    try:
        ctypes.CDLL(LIBRARY)  # asks the driver nothing
    except OSError:
        return Reading(problems=(f"no NVIDIA driver on this host: {LIBRARY} was not found",))
    if not _asking.acquire(timeout=timeout):
        return _no_answer("another thread has waited for it all the time")
    try:
        return _read_elsewhere(timeout)
    finally:
        _asking.release()


def asker() -> int | None:
    """The pid of the process that asks, while it is there: it is this process's child, and no server's."""
    last = _asker
    return last.pid if last is not None and last.returncode is None else None


def _read_elsewhere(timeout: float) -> Reading:
    global _asker, _not_before
    if _asker is not None and _asker.poll() is None:
        return _no_answer(f"process {_asker.pid} still waits for it")
    if time.monotonic() < _not_before:
        return _no_answer(f"it was asked less than {AGAIN_S:.0f} s ago")
    try:
        _asker = asked = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=_environ(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except (OSError, TypeError) as error:  # TypeError: a Python that does not know its executable
        return _broken(f"{sys.executable!r} could not be started: {error}")
    try:
        said, complaint = asked.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _not_before = time.monotonic() + AGAIN_S
        return _no_answer(f"it was asked {timeout:.0f} s ago")
    finally:
        asked.kill()  # where it is still there: also when a signal handler raised
    try:
        return _from_json(json.loads(said.splitlines()[-1]))
    except (IndexError, ValueError, TypeError, KeyError):
        why = complaint.strip().splitlines()[-1:] or [f"exit status {asked.returncode}"]
        return _broken(why[0][:200])


def _environ() -> dict[str, str]:
    seen = {name: value for name, value in os.environ.items() if name.startswith(_SEEN)}
    ours = str(Path(__file__).parents[2])  # not on the path where that is the current folder
    return {**seen, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), ours])}


def _no_answer(since: str) -> Reading:
    text = (
        f"the NVIDIA driver does not answer ({since}); `dmesg | grep -i -e xid -e nvrm` may say why: reset the GPU or "
        "restart this worker's host, and where `nvidia-smi` is only slow, turn persistence mode on (`nvidia-smi -pm 1`)"
    )
    return Reading(problems=(text,), answered=False)


def _broken(why: str) -> Reading:
    text = f"the process that asks the NVIDIA driver broke off ({why}); see whether `nvidia-smi` works on this worker"
    return Reading(problems=(text,), answered=False)


def _from_json(said: dict[str, Any]) -> Reading:
    gpus = []
    for fields in said["gpus"]:
        processes = tuple(GpuProcess(**process) for process in fields.pop("processes"))
        capability = fields.pop("compute_capability")
        gpus.append(
            Gpu(
                **fields,
                processes=processes,
                compute_capability=tuple(capability) if capability else None,
            )
        )
    return Reading(tuple(gpus), tuple(said["problems"]), said["driver"])


def _read_here() -> Reading:
    try:
        with started() as nvml:
            gpus: list[Gpu] = []
            problems: list[str] = []
            for index in range(nvml.nvmlDeviceGetCount()):
                try:
                    found = _read_gpu(nvml, index)
                    if not found:
                        problems.append(f"GPU {index} is in MIG mode and has no MIG device")
                    gpus += found
                except nvml.NVMLError as error:
                    problems.append(f"GPU {index} cannot be read: {error}")
            return Reading(tuple(gpus), tuple(problems), _driver_version(nvml))
    except ImportError as error:
        return Reading(
            problems=(f"nvidia-ml-py is not installed here ({error}): no GPU can be listed",)
        )
    except Exception as error:  # pynvml's own classes do not exist when its library is missing
        return Reading(problems=(_why_no_driver(error),))


def _driver_version(nvml: Any) -> str:
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        driver = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError as error:
        return f"an NVIDIA driver that does not say its version ({error})"
    return f"NVIDIA driver {driver}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"


@contextmanager
def started() -> Iterator[Any]:
    """A started NVML; raises what pynvml raises, ImportError included."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> list[Gpu]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    whole = _read_device(nvml, handle, index, capability, None)
    if not _mig_enabled(nvml, handle):
        return [whole]
    found = []
    for position in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position)
        except nvml.NVMLError_NotFound:
            continue  # the places of MIG devices have gaps
        found.append(_read_device(nvml, mig, index, capability, whole.uuid))
    return found


def _read_device(
    nvml: Any, handle: Any, index: int, capability: tuple[int, int], parent: str | None
) -> Gpu:
    total, free = _memory(nvml, handle)
    return Gpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=total,
        free_bytes=free,
        used_bytes=total - free,
        processes=_processes(nvml, handle),
        compute_capability=capability,
        parent_uuid=parent,
    )


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """(allocatable, free) bytes. Version 2 tells the driver's reserve; older drivers lack it."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return info.total - info.reserved, info.free
    except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported):
        pass
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return info.total, info.free
    except nvml.NVMLError_NotSupported:
        available, total = host_memory.available_and_total()
        return total, available


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return ()  # no permission, or a virtual GPU: memory still tells that it is in use
    return tuple(GpuProcess(p.pid, p.usedGpuMemory) for p in running)


def _mig_enabled(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # a GPU or driver without MIG


def _why_no_driver(error: Exception) -> str:
    import pynvml

    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        return f"no NVIDIA driver on this host: {LIBRARY} was not found"
    if isinstance(error, pynvml.NVMLError_DriverNotLoaded):
        return f"{LIBRARY} is here, but the NVIDIA kernel driver is not loaded"
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return "the NVIDIA library and kernel driver differ in version; restart this worker's host"
    return f"the NVIDIA driver does not answer: {error}"


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_read_here())))
