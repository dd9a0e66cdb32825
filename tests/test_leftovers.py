"""The check that tests end clean does find what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from tests.leftovers import Snapshot


def test_a_detached_process_is_found_and_ended() -> None:
    before = Snapshot()
    program = (
        "import subprocess;"
        "print(subprocess.Popen(['sleep', '600'], stdout=-3, start_new_session=True).pid)"
    )
    pid = int(subprocess.check_output([sys.executable, "-c", program]))  # whose parent is gone now

    (line,) = before.leftovers(settle=0)

    assert line == f"process {pid} (session {pid}): sleep 600"
    before.end_processes()
    os.waitpid(pid, 0)
    assert before.leftovers(settle=0) == []


def test_a_segment_counts_when_nobody_has_it_open() -> None:
    resource_tracker.ensure_running()  # else the first segment starts it
    before = Snapshot()
    segment = SharedMemory(create=True, size=16, name="psm_left_by_a_test")
    try:
        assert before.leftovers(settle=0) == []
        segment.close()
        assert before.leftovers(settle=0) == ["segment /dev/shm/psm_left_by_a_test"]
    finally:
        segment.unlink()


def test_a_temporary_folder_counts_when_no_process_uses_it() -> None:
    before = Snapshot()
    folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    try:
        user = subprocess.Popen(["sleep", "600"], env={**os.environ, "TMPDIR": str(folder)})
        try:
            assert before._files() == []
        finally:
            user.kill()
            user.wait()
        assert before.leftovers(settle=0) == [f"temporary {folder}"]
    finally:
        folder.rmdir()
