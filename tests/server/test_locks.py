"""Locks between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_vllm.exceptions import InsecurePath, ServerError
from airflow_provider_vllm.server.locks import file_lock, is_held, try_lock
from tests.server.conftest import wait_for

HOLD = """
import sys, time
from pathlib import Path
from airflow_provider_vllm.server.locks import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "lock"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_it_excludes_and_ends_with_its_holder(tmp_path: Path, holder: subprocess.Popen) -> None:
    path = tmp_path / "lock"
    assert is_held(path)
    assert try_lock(path) is None
    holder.kill()
    with file_lock(path, timeout=5):
        assert is_held(path)
    assert not is_held(path)


def test_a_frozen_holder_is_named_after_the_timeout(
    tmp_path: Path, holder: subprocess.Popen
) -> None:
    holder.send_signal(signal.SIGSTOP)
    with (
        pytest.raises(ServerError, match=rf"held by pid {holder.pid} for more than 0.1 s"),
        file_lock(tmp_path / "lock", timeout=0.1),
    ):
        pytest.fail("two hold it")


def test_whoever_waited_for_a_removed_file_locks_the_one_that_is_there_now(
    tmp_path: Path, holder: subprocess.Popen
) -> None:
    path = tmp_path / "lock"
    path.unlink()
    fresh = try_lock(path)
    assert fresh is not None
    got = threading.Event()

    def wait() -> None:
        with file_lock(path):
            got.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    holder.kill()
    holder.wait()
    assert not got.wait(0.3)
    os.close(fresh)
    assert got.wait(5)
    waiter.join()


def test_a_folder_that_was_swept_is_made_again(tmp_path: Path) -> None:
    with file_lock(tmp_path / "swept" / "lock", timeout=5):
        assert is_held(tmp_path / "swept" / "lock")


def test_no_lock_and_a_symlink(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "lock")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(InsecurePath):
        try_lock(tmp_path / "link")
    assert not (tmp_path / "other").exists()


def test_a_child_does_not_inherit_it(tmp_path: Path) -> None:
    fd = try_lock(tmp_path / "lock")
    assert fd is not None
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False
    ) as child:
        os.close(fd)
        wait_for(lambda: not is_held(tmp_path / "lock"))
        assert child.poll() is None
        child.kill()
