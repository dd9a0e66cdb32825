"""Locks of GPUs between real processes: races, deaths, inheritance, and folders of strangers."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from airflow_provider_vllm.exceptions import InsecurePath, NoFreeGpu
from airflow_provider_vllm.server import gpu_locks
from airflow_provider_vllm.server.gpus import Gpu, Shortage
from airflow_provider_vllm.server.private import private_dir

STRANGER = 65534  # nobody

# Takes one of the GPUs named on the command line when it is told to, says what it got, and holds it
# until its stdin closes.
CLAIMER = """
import json, sys
from pathlib import Path
from airflow_provider_vllm.server import gpu_locks
from airflow_provider_vllm.server.gpus import Gpu
folder, owner, count, *uuids = sys.argv[1:]
gpus = [Gpu(uuid, i, "H100", 80, 80, 0) for i, uuid in enumerate(uuids)]
print("waiting", flush=True)
sys.stdin.readline()
found = gpu_locks.claim(Path(folder), gpus, int(count), owner=owner)
print(json.dumps(list(getattr(found, "uuids", ()))), flush=True)
sys.stdin.readline()
"""

# Takes a lock, hands it on to a child, says both pids, and waits to be killed.
HOLDER = """
import subprocess, sys
from pathlib import Path
from airflow_provider_vllm.server import gpu_locks
fds = gpu_locks.take(Path(sys.argv[1]), [sys.argv[2]], owner="server-1")
child = subprocess.Popen(
    ["cat"], stdin=sys.stdin, pass_fds=fds if sys.argv[3] == "pass" else ()
)
print(child.pid, flush=True)
child.wait()
"""


def names(count: int) -> list[str]:
    return [f"GPU-{index}" for index in range(count)]


@contextmanager
def started(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], line: str = "go\n") -> None:
    assert process.stdin
    process.stdin.write(line)
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def race(folder: Path, starts: int, gpus: int, each: int) -> list[list[str]]:
    """`starts` processes claim `each` of `gpus` GPUs at the same moment; what each got."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(CLAIMER, str(folder), f"s{n}", str(each), *names(gpus)))
            for n in range(starts)
        ]
        assert [hear(process) for process in processes] == ["waiting"] * starts
        for process in processes:
            tell(process)
        return [json.loads(hear(process)) for process in processes]


def test_of_two_starts_racing_for_one_gpu_one_gets_it(folder: Path) -> None:
    for _ in range(3):
        got = race(folder, starts=2, gpus=1, each=1)
        assert sorted(got) == [[], ["GPU-0"]]
        assert gpu_locks.locked(folder) == frozenset()


def test_no_gpu_is_given_twice_and_none_is_left_over(folder: Path) -> None:
    got = race(folder, starts=6, gpus=4, each=1)
    given = [uuid for uuids in got for uuid in uuids]
    assert sorted(given) == names(4)


def test_several_gpus_are_taken_whole_or_not_at_all(folder: Path) -> None:
    got = race(folder, starts=4, gpus=5, each=2)
    assert {len(uuids) for uuids in got} <= {0, 2}
    given = [uuid for uuids in got for uuid in uuids]
    assert len(given) == len(set(given)) == 4


def test_a_lock_ends_with_its_holder_however_that_dies(folder: Path) -> None:
    with started(CLAIMER, str(folder), "server-1", "1", "GPU-0") as process:
        hear(process)
        tell(process)
        assert hear(process) == '["GPU-0"]'
        holder = gpu_locks.holders(folder)["GPU-0"]
        assert (holder.owner, holder.pid) == ("server-1", process.pid)
        with pytest.raises(NoFreeGpu, match=f"GPU-0 is held by server-1 .pid {process.pid}, since"):
            gpu_locks.take(folder, ["GPU-0"])
        process.kill()
        process.wait()
        fds = gpu_locks.take(folder, ["GPU-0"], owner="server-2")
    assert gpu_locks.holders(folder)["GPU-0"].owner == "server-2"
    gpu_locks.release(fds)
    assert gpu_locks.locked(folder) == frozenset()


def test_a_lock_that_was_handed_on_outlives_who_took_it(folder: Path) -> None:
    with started(HOLDER, str(folder), "GPU-0", "pass") as process:
        child = int(hear(process))
        process.kill()
        process.wait()
        assert Path(f"/proc/{child}").exists()
        assert gpu_locks.locked(folder) == frozenset({"GPU-0"})
        process.communicate()  # the end of its stdin ends the child
        os.waitpid(child, 0)  # an orphan of ours: pytest is the sub-reaper of its tests
        assert gpu_locks.locked(folder) == frozenset()


def test_children_do_not_inherit_a_lock_unasked(folder: Path) -> None:
    with started(HOLDER, str(folder), "GPU-0", "keep") as process:
        child = int(hear(process))
        process.kill()
        process.wait()
        assert Path(f"/proc/{child}").exists()
        assert gpu_locks.locked(folder) == frozenset()
        process.communicate()
        os.waitpid(child, 0)


def test_a_failed_take_holds_nothing(folder: Path) -> None:
    held = gpu_locks.take(folder, ["GPU-1"])
    with pytest.raises(NoFreeGpu):
        gpu_locks.take(folder, ["GPU-0", "GPU-1", "GPU-2"])
    assert gpu_locks.locked(folder) == frozenset({"GPU-1"})
    gpu_locks.release(held)


def test_locks_are_taken_in_one_order_whatever_was_asked(folder: Path) -> None:
    """Else two starts with the same GPUs in different orders could both fail."""
    held = gpu_locks.take(folder, ["GPU-0"])
    with pytest.raises(NoFreeGpu):
        gpu_locks.take(folder, ["GPU-1", "GPU-0"])
    assert not (folder / "GPU-1.lock").exists()
    gpu_locks.release(held)


def test_descriptors_come_in_the_order_of_the_gpus(folder: Path) -> None:
    fds = gpu_locks.take(folder, ["GPU-2", "MIG-GPU-7/1/0", "GPU-0", "GPU-2"])
    opened = [Path(f"/proc/self/fd/{fd}").readlink().name for fd in fds]
    assert opened == ["GPU-2.lock", "MIG-GPU-7%2F1%2F0.lock", "GPU-0.lock"]
    assert gpu_locks.locked(folder) == {"GPU-2", "MIG-GPU-7/1/0", "GPU-0"}
    gpu_locks.release(fds)


def test_looking_at_locks_never_makes_a_start_fail(folder: Path) -> None:
    look = (
        "import sys\nfrom pathlib import Path\nfrom airflow_provider_vllm.server import gpu_locks\n"
    )
    look += "print('looking', flush=True)\nwhile True: gpu_locks.locked(Path(sys.argv[1]))\n"
    gpu_locks.release(gpu_locks.take(folder, ["GPU-0"]))
    with started(look, str(folder)) as first, started(look, str(folder)) as second:
        assert hear(first) == hear(second) == "looking"
        for _ in range(300):
            gpu_locks.release(gpu_locks.take(folder, ["GPU-0"]))


def test_a_claim_names_what_holds_the_gpus(folder: Path) -> None:
    listed = [Gpu("GPU-0", 0, "H100", 80, 80, 0)]
    first = gpu_locks.claim(folder, listed, 1, owner="server-1")
    assert isinstance(first, gpu_locks.Claim)
    assert first.uuids == ("GPU-0",)
    second = gpu_locks.claim(folder, listed, 1, owner="server-2")
    assert isinstance(second, Shortage)
    assert second.waiting_helps
    assert f"server-1 (pid {os.getpid()}" in second.held["GPU-0"]
    gpu_locks.release(first.fds)


def test_nothing_is_locked_where_nothing_ever_was(folder: Path) -> None:
    assert gpu_locks.locked(folder) == frozenset()
    assert not folder.exists()


def test_folder_and_files_are_the_users_own(folder: Path) -> None:
    gpu_locks.release(gpu_locks.take(folder, ["GPU-0"]))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "GPU-0.lock").stat().st_mode) == 0o600


def test_a_folder_that_others_could_have_prepared_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o750)
    folder.chmod(0o750)
    refused(folder, "can be used by others .mode 0750")
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    refused(folder, "is a symlink")
    folder.unlink()
    folder.touch()
    refused(folder, "is something else")
    assert not any((tmp_path / "elsewhere").iterdir())


def test_another_users_folder_is_refused(folder: Path) -> None:
    if os.geteuid():
        strange = Path("/usr")  # root's
    else:
        strange = private_dir(folder)
        os.chown(strange, STRANGER, STRANGER)
    refused(strange, "belongs to user")


def refused(folder: Path, why: str) -> None:
    with pytest.raises(InsecurePath, match=why):
        gpu_locks.take(folder, ["GPU-0"])
    with pytest.raises(InsecurePath, match=why):
        gpu_locks.locked(folder)


def test_a_lock_file_that_is_no_plain_file_of_ours_is_refused(folder: Path, tmp_path: Path) -> None:
    private_dir(folder)
    lock = folder / "GPU-0.lock"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock.symlink_to(victim)
    refused(folder, "symbolic link")
    assert victim.read_text() == "precious"
    lock.unlink()
    os.mkfifo(lock, 0o600)  # must be refused, not waited for
    refused(folder, "something else|opened as a file")
    lock.unlink()
    lock.touch()
    lock.chmod(0o666)
    refused(folder, "can be used by others")
