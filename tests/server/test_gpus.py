"""The pure choice among GPUs, and what is said of them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.server import gpus
from airflow_provider_vllm.server.gpus import Gpu, GpuProcess, Shortage

GIB = 1024**3


def gpu(
    uuid: str, *, free: int = 80, total: int = 80, pids: tuple[int, ...] = (), **more: Any
) -> Gpu:
    processes = tuple(GpuProcess(pid, GIB) for pid in pids)
    index = more.pop("index", 0)
    name = more.pop("name", "H100")
    used = (total - free) * GIB
    return Gpu(uuid, index, name, total * GIB, free * GIB, used, processes, **more)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "abc"),
        ("", ""),
        ("1", "b"),
        ("2, 0", "ca"),
        ("GPU-c", "c"),
        ("GPU-b,GPU-a", "ba"),
        ("0,9,1", "a"),  # as CUDA: the first wrong entry ends the list
        ("-1", ""),
        ("GPU-", ""),  # names three
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str | None, expected: str) -> None:
    listed = [gpu(f"GPU-{name}", index=index) for index, name in enumerate("abc")]
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [g.uuid for g in gpus.allowed(listed, environ)] == [f"GPU-{c}" for c in expected]


def test_fewest_processes_come_first_then_most_free_memory() -> None:
    listed = [gpu("a", free=70, pids=(1,)), gpu("b", free=30), gpu("c", free=60)]
    assert gpus.choose(listed, 1) == ("c",)
    assert gpus.choose(listed, 2) == ("c", "b")
    assert gpus.choose(listed, 3) == ("c", "b", "a")
    assert gpus.choose(listed, 0) == ()


def test_several_gpus_are_of_one_kind_where_that_is_possible() -> None:
    listed = [gpu("a"), gpu("b", name="L4", free=20, total=24), gpu("c", pids=(1, 2))]
    assert gpus.choose(listed, 2) == ("a", "c")
    assert gpus.choose(listed, 3) == ("a", "b", "c")


def test_a_shortage_says_what_holds_each_gpu() -> None:
    me = GpuProcess(os.getpid(), 70 * GIB)
    full = dataclasses.replace(gpu("b", free=10), processes=(me,))
    found = gpus.choose([gpu("a"), full], 1, locked=frozenset("a"), min_free_bytes=40 * GIB)
    assert isinstance(found, Shortage)
    assert (found.asked, found.free, found.waiting_helps) == (1, (), True)
    assert found.held["a"] == "locked by a vLLM server of this provider"
    assert "10.00 GiB of 80.00 GiB free, 40.00 GiB needed" in found.held["b"]
    assert f"pid {os.getpid()}" in found.held["b"]
    assert "70.00 GiB" in found.held["b"]
    assert "a: locked" in str(found)
    assert "0 can be had" in str(found)


def test_waiting_does_not_help_for_what_the_worker_does_not_have() -> None:
    few = gpus.choose([gpu("a")], 2)
    small = gpus.choose([gpu("a", total=24, free=24)], 1, min_free_bytes=40 * GIB)
    none = gpus.choose([], 1)
    unknown = gpus.choose([gpu("a")], 1, wanted=("GPU-x",))
    for found in (few, small, none, unknown):
        assert isinstance(found, Shortage)
        assert not found.waiting_helps
        assert "Waiting does not help" in str(found)
    busy = gpus.choose([gpu("a", free=1)], 1, min_free_fraction=0.9)
    assert isinstance(busy, Shortage)
    assert busy.waiting_helps


def test_wanted_gpus_are_taken_in_their_order_or_not_at_all() -> None:
    listed = [gpu("GPU-aa"), gpu("GPU-ab"), gpu("GPU-c", pids=(1,))]
    assert gpus.choose(listed, 1, wanted=("GPU-c", "GPU-aa")) == ("GPU-c", "GPU-aa")
    assert gpus.choose(listed, 1, wanted=("GPU-ab",)) == ("GPU-ab",)
    assert gpus.choose(listed, 1, wanted=("GPU-c",), locked=frozenset({"GPU-aa"})) == ("GPU-c",)
    for wanted, reason in {
        ("GPU-a",): "several GPUs begin like this",
        ("GPU-c", "GPU-c"): "asked for twice",
        ("GPU-x",): "not a GPU of this worker",
    }.items():
        found = gpus.choose(listed, 1, wanted=wanted)
        assert isinstance(found, Shortage)
        assert found.held[wanted[-1]] == reason


def test_a_mig_device_is_used_alone() -> None:
    listed = [gpu("MIG-1", parent_uuid="GPU-a"), gpu("MIG-2", parent_uuid="GPU-a"), gpu("GPU-b")]
    assert gpus.choose(listed, 1, locked=frozenset({"GPU-b"})) == ("MIG-1",)
    found = gpus.choose(listed, 2)
    assert isinstance(found, Shortage)
    assert not found.waiting_helps
    found = gpus.choose(listed, 2, wanted=("MIG-1", "MIG-2"))
    assert isinstance(found, Shortage)
    assert "only one" in found.held["MIG-1"]


def test_memory_that_does_not_come_back_is_told_by_difference() -> None:
    before = [gpu("a", free=70, pids=(1,)), gpu("b"), gpu("gone")]
    after = [gpu("a", free=40, pids=(1, 55)), gpu("b", free=79)]
    (left,) = gpus.memory_returned(before, after, tolerance=2 * GIB)
    assert (left.uuid, left.missing_bytes, [p.pid for p in left.holders]) == ("a", 30 * GIB, [55])
    assert "30.00 GiB more in use" in str(left)
    assert "pid 55" in str(left)
    assert gpus.memory_returned(before, before) == ()
    (left,) = gpus.memory_returned([gpu("a")], [gpu("a", free=1)])
    assert "no process that holds it" in str(left)


def test_a_process_that_was_there_before_and_grew_is_a_holder() -> None:
    small, large = (GpuProcess(7, size * GIB) for size in (2, 30))
    before = dataclasses.replace(gpu("a", free=78), processes=(small, GpuProcess(8, GIB)))
    after = dataclasses.replace(gpu("a", free=50), processes=(large, GpuProcess(8, GIB)))
    (left,) = gpus.memory_returned([before], [after])
    assert left.holders == (large,)


def test_a_process_is_named_only_where_pids_are_the_hosts() -> None:
    text = gpus.describe_process(GpuProcess(os.getpid(), GIB))
    in_host = str(Path("/proc/self/ns/pid").readlink()) == "pid:[4026531836]"
    name = Path("/proc/self/comm").read_text().strip() if in_host else "the host's number"
    assert text == f"pid {os.getpid()} ({name}, 1.00 GiB)"


def test_the_environment_names_gpus_by_uuid_where_vllm_reads_them() -> None:
    listed = [gpu("GPU-a", index=0), gpu("GPU-b", index=3)]
    assert gpus.visible_devices(["GPU-b", "GPU-a"]) == "GPU-b,GPU-a"
    assert gpus.device_environ(("GPU-b",), listed) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    assert gpus.device_environ((), listed) == {"CUDA_VISIBLE_DEVICES": ""}
    assert gpus.device_environ(("GPU-b", "GPU-a"), listed, reads_uuids=False) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "3,0",
    }
