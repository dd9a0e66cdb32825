"""The check that tests end clean does find what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

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
    before = Snapshot()
    segment = SharedMemory(create=True, size=16, name="psm_left_by_a_test")
    try:
        assert before.leftovers(settle=0) == []
        segment.close()
        assert before.leftovers(settle=0) == ["segment /dev/shm/psm_left_by_a_test"]
    finally:
        segment.unlink()
