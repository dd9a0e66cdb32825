"""The GPUs of this worker, and the pure choice of some of them for a server.

What enters is what `nvml` reads; what leaves are the `Gpu` values that this worker may use, the
UUIDs chosen for a server, or a `Shortage` that says what holds each GPU.

- Nothing here needs a driver: without one `list_gpus()` is empty and `driver_status()` says why.
- NVML ignores CUDA_VISIBLE_DEVICES; `list_gpus()` does not, so that a worker bound to some GPUs of
  its host never takes the others.
- GPUs are named by UUID from here on. An index means one thing to NVML, another to CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from airflow_provider_vllm.server import nvml
from airflow_provider_vllm.server.nvml import Gpu, GpuProcess
from airflow_provider_vllm.server.sizes import GIB, gib

# The inode that the kernel gives the first pid namespace (PROC_PID_INIT_INO).
_HOST_PID_NAMESPACE = "pid:[4026531836]"


NONE_LISTED_FIX = "Mend that, or send the task to another queue."


@dataclass(frozen=True)
class Shortage:
    """Fewer GPUs can be had than asked for.

    `held` maps the UUID of every GPU that cannot be had to the reason. `waiting_helps` is False
    where no amount of waiting gives this host what was asked for.
    """

    asked: int
    free: tuple[str, ...]
    held: Mapping[str, str] = field(default_factory=dict)
    waiting_helps: bool = True

    def __str__(self) -> str:
        lines = [f"{self.asked} GPU(s) asked for, {len(self.free)} can be had on this host."]
        lines += [f"  {uuid}: {reason}" for uuid, reason in self.held.items()]
        if not self.waiting_helps:
            lines.append(
                "Waiting does not help: ask for what this host has (`gpus`), or send the task to "
                "another queue."
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class NotReturned:
    """GPU memory that a stopped server has not given back, and who is seen to hold it."""

    uuid: str
    missing_bytes: int
    holders: tuple[GpuProcess, ...]

    def __str__(self) -> str:
        held = f"{self.uuid}: {gib(self.missing_bytes)} more in use than before the start"
        if not self.holders:
            return f"{held}; NVML shows no process that holds it"
        return f"{held}; held by " + ", ".join(describe_process(p) for p in self.holders)


def driver_present() -> bool:
    """Whether this host has an NVIDIA driver with at least one GPU, or one that can't be asked."""
    found = nvml.read()
    return bool(found.gpus) or not found.answered


def driver_status() -> str:
    """One sentence: driver, CUDA version and number of GPUs, or why none can be used."""
    found = nvml.read()
    if not found.gpus:
        return "; ".join(found.problems) or "the NVIDIA driver lists no GPU"
    return "; ".join(
        [f"{found.driver}, {len(found.gpus)} GPU(s) or MIG device(s)", *found.problems]
    )


def none_listed(asked: int) -> str:
    """What the driver says where no GPU may be used and `asked` are needed. Waits for it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    bound = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r} on this worker"
    return f"{asked} GPU(s) asked for, and none can be had: {driver_status()}{bound}."


def explain(shortage: Shortage, gpus: Sequence[Gpu]) -> str:
    """Why `gpus` do not do, and what to do. Waits for the driver where there are none."""
    if gpus:
        return str(shortage)
    return f"{none_listed(shortage.asked)} {NONE_LISTED_FIX}"


def list_gpus(
    environ: Mapping[str, str] | None = None, *, timeout: float | None = None
) -> tuple[Gpu, ...]:
    """The GPUs that this worker may use; () without a driver. Never raises.

    `environ` (this process's own by default) may hold CUDA_VISIBLE_DEVICES, which is obeyed. Waits `timeout` seconds
    at most for the driver, by default `nvml.TIMEOUT_S`.
    """
    return allowed(nvml.read(timeout).gpus, os.environ if environ is None else environ)


def allowed(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES in `environ` leaves visible, as CUDA reads it.

    Entries are indices or (beginnings of) UUIDs; the first entry that names nothing ends the list.
    Indices are taken in NVML's order, which is CUDA's under CUDA_DEVICE_ORDER=PCI_BUS_ID and
    wherever all GPUs are of one kind.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return tuple(gpus)
    visible: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        matching = _matching(gpus, entry)
        if not matching:
            break
        visible += [gpu for gpu in matching if gpu not in visible]
    return tuple(visible)


def choose(
    gpus: Sequence[Gpu],
    count: int,
    *,
    locked: frozenset[str] = frozenset(),
    wanted: tuple[str, ...] = (),
    min_free_bytes: int = 0,
    min_free_fraction: float = 0.0,
) -> tuple[str, ...] | Shortage:
    """The UUIDs of `count` GPUs: not locked, fewest processes, most free memory. Pure.

    `wanted` names the GPUs (UUIDs, or beginnings of them) and then decides alone; `count` is not
    looked at. A GPU with less free memory than `min_free_bytes`, or than `min_free_fraction` of its
    total, is held. Several GPUs are taken of one kind where that is possible, and never among MIG
    devices: CUDA shows a process only one of those.
    """
    if wanted:
        return _choose_wanted(gpus, wanted, locked, min_free_bytes, min_free_fraction)
    if count <= 0:
        return ()
    held: dict[str, str] = {}
    free: list[Gpu] = []
    for gpu in gpus:
        reason = _held_because(gpu, locked, min_free_bytes, min_free_fraction)
        if count > 1 and gpu.is_mig:
            reason = "a MIG device, and a process can use only one of those"
        if reason:
            held[gpu.uuid] = reason
        else:
            free.append(gpu)
    if len(free) < count:
        possible = len([g for g in gpus if count == 1 or not g.is_mig])
        waiting_helps = possible >= count and _large_enough(gpus, count, min_free_bytes)
        return Shortage(count, tuple(g.uuid for g in free), held, waiting_helps)
    return tuple(gpu.uuid for gpu in _best(free, count))


def visible_devices(uuids: Iterable[str]) -> str:
    """The value of CUDA_VISIBLE_DEVICES that shows exactly these GPUs, in this order."""
    return ",".join(uuids)


def device_environ(
    uuids: Sequence[str], gpus: Sequence[Gpu], *, reads_uuids: bool = True
) -> dict[str, str]:
    """The variables that show a server exactly the GPUs `uuids`, () hiding all.

    A vLLM that does not read UUIDs (`Interpreter.reads_gpu_uuids`) gets NVML's indices and the
    order in which they hold. Raises KeyError for a UUID that `gpus` does not have then.
    """
    if reads_uuids or not uuids:
        return {"CUDA_VISIBLE_DEVICES": visible_devices(uuids)}
    index = {gpu.uuid: str(gpu.index) for gpu in gpus if not gpu.is_mig}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(index[uuid] for uuid in uuids),
    }


def memory_returned(
    before: Sequence[Gpu], after: Sequence[Gpu], tolerance: int = GIB // 2
) -> tuple[NotReturned, ...]:
    """What is still in use in `after` beyond `before` + `tolerance` bytes, per GPU; () when all is
    back.

    By difference, because inside a container NVML names processes by the host's numbers, so that
    the server's own cannot be told apart. Another program that began in between looks the same and
    is named too; `tolerance` leaves out its small steps. A GPU that `after` no longer lists is left
    out.
    """
    now = {gpu.uuid: gpu for gpu in after}
    found = []
    for old in before:
        new = now.get(old.uuid)
        if new is None or new.used_bytes - old.used_bytes <= tolerance:
            continue
        known = {process.pid: process.used_bytes or 0 for process in old.processes}
        holders = tuple(p for p in new.processes if (p.used_bytes or 0) > known.get(p.pid, -1))
        found.append(NotReturned(old.uuid, new.used_bytes - old.used_bytes, holders))
    return tuple(found)


def describe_process(process: GpuProcess) -> str:
    """`pid 12 (python, 3.0 GiB)`; in a container the pid is the host's, and no name is claimed."""
    facts = []
    if _sees_host_pids():
        try:
            comm = Path(f"/proc/{process.pid}/comm")
            facts.append(comm.read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            facts.append("not visible")
    else:
        facts.append("the host's number")
    if process.used_bytes is not None:
        facts.append(gib(process.used_bytes))
    return f"pid {process.pid} ({', '.join(facts)})"


def _sees_host_pids() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _HOST_PID_NAMESPACE
    except OSError:
        return False


def _choose_wanted(
    gpus: Sequence[Gpu],
    wanted: tuple[str, ...],
    locked: frozenset[str],
    min_free_bytes: int,
    min_free_fraction: float,
) -> tuple[str, ...] | Shortage:
    held: dict[str, str] = {}
    chosen: list[str] = []
    waiting_helps = True
    for name in wanted:
        matching = [gpu for gpu in gpus if gpu.uuid.startswith(name)] if name else []
        reason: str | None
        if len(matching) != 1:
            reason = "several GPUs begin like this" if matching else "not a GPU of this worker"
            waiting_helps = False
        elif matching[0].uuid in chosen:
            reason, waiting_helps = "asked for twice", False
        elif matching[0].is_mig and len(wanted) > 1:
            reason = "a MIG device, and a process can use only one of those"
            waiting_helps = False
        else:
            reason = _held_because(matching[0], locked, min_free_bytes, min_free_fraction)
        if reason:
            held[name] = reason
        else:
            chosen.append(matching[0].uuid)
    if held:
        return Shortage(len(wanted), tuple(chosen), held, waiting_helps)
    return tuple(chosen)


def _held_because(
    gpu: Gpu, locked: frozenset[str], min_free_bytes: int, min_free_fraction: float
) -> str | None:
    if gpu.uuid in locked:
        return "locked by a vLLM server of this provider"
    needed = max(min_free_bytes, int(gpu.total_bytes * min_free_fraction))
    if gpu.free_bytes >= needed:
        return None
    lack = f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
    lack += f", {gib(needed)} needed"
    if gpu.processes:
        lack += "; in use by " + ", ".join(describe_process(p) for p in gpu.processes)
    return lack


def _large_enough(gpus: Sequence[Gpu], count: int, min_free_bytes: int) -> bool:
    return sum(gpu.total_bytes >= min_free_bytes for gpu in gpus) >= count


def _best(free: list[Gpu], count: int) -> list[Gpu]:
    ranked = sorted(free, key=lambda gpu: (len(gpu.processes), -gpu.free_bytes, gpu.index))
    by_kind: dict[tuple[str, int], list[Gpu]] = {}
    for gpu in ranked:
        by_kind.setdefault((gpu.name, gpu.total_bytes), []).append(gpu)
    groups = [kind[:count] for kind in by_kind.values() if len(kind) >= count]
    if not groups:
        return ranked[:count]
    return min(
        groups, key=lambda g: (sum(len(x.processes) for x in g), -min(x.free_bytes for x in g))
    )


def _matching(gpus: Sequence[Gpu], entry: str) -> list[Gpu]:
    if entry.isdigit():
        return [gpu for gpu in gpus if gpu.index == int(entry)]
    found = [g for g in gpus if entry and g.uuid.startswith(entry)]
    return found if len(found) == 1 else []
