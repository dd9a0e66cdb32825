"""The NVIDIA driver's view of this host, read through `pynvml`; nothing of it is decided here.

What enters is NVML; what leaves is a `Reading`: `Gpu` values and sentences about what could not be read.

- Reading never raises: a host without a driver is a normal host.
- NVML is asked in a process of its own. A wedged driver does not answer, and then no signal ends the one that asks;
  here it is left behind, and what it was asked for goes on without it.
- `pynvml` is imported inside functions only: DAG files are parsed on hosts without a GPU.

    python -m airflow_provider_vllm.server.nvml     the reading as JSON
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from airflow_provider_vllm.server import host_memory

LIBRARY = "libnvidia-ml.so.1"
TIMEOUT_S = 30.0  # without persistence mode the driver wakes each GPU for it, seconds for one
_asked = threading.Lock()
_stuck: subprocess.Popen[str] | None = None


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

    `answered` is False where there is a driver that does not answer.
    """

    gpus: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()
    driver: str = ""
    answered: bool = True


def read() -> Reading:
    """What NVML says within `TIMEOUT_S`. Never raises."""
    try:
        ctypes.CDLL(LIBRARY)  # asks the driver nothing
    except OSError:
        return Reading(problems=(f"no NVIDIA driver on this host: {LIBRARY} was not found",))
    with _asked:
        return _read_elsewhere()


def _read_elsewhere() -> Reading:
    global _stuck
    if _stuck is not None and _stuck.poll() is None:
        return _no_answer(f"process {_stuck.pid} still waits for it")
    try:
        asker = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return Reading(problems=(f"the NVIDIA driver could not be asked: {error}",))
    try:
        said, complaint = asker.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        asker.kill()
        _stuck = asker
        return _no_answer(f"it was asked {TIMEOUT_S:.0f} s ago")
    try:
        return _from_json(json.loads(said.splitlines()[-1]))
    except (IndexError, ValueError, TypeError, KeyError):
        why = complaint.strip().splitlines()[-1:] or [f"exit status {asker.returncode}"]
        return Reading(problems=(f"the NVIDIA library broke off when it was asked: {why[0]}",))


def _no_answer(since: str) -> Reading:
    text = (
        f"the NVIDIA driver does not answer ({since}); `dmesg | grep -i -e xid -e nvrm` may say why: reset the GPU or "
        "restart this worker's host"
    )
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
