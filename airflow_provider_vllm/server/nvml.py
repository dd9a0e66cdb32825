"""The NVIDIA driver's view of this host, read through `pynvml`; nothing of it is decided here.

What enters is NVML; what leaves are `Gpu` values and sentences about what could not be read.

- Reading never raises: a host without a driver is a normal host.
- `pynvml` is imported inside functions only: DAG files are parsed on hosts without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from airflow_provider_vllm.server import host_memory

LIBRARY = "libnvidia-ml.so.1"


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


def read() -> tuple[tuple[Gpu, ...], list[str]]:
    """Every GPU and MIG device of the host, and one sentence for each thing that went wrong."""
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
            return tuple(gpus), problems
    except ImportError as error:
        return (), [f"nvidia-ml-py is not installed here ({error}): no GPU can be listed"]
    except Exception as error:  # pynvml's own classes do not exist when its library is missing
        return (), [_why_no_driver(error)]


def driver_version() -> str:
    with started() as nvml:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        driver = nvml.nvmlSystemGetDriverVersion()
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
