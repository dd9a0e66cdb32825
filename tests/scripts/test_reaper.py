"""The end of what a command has left behind: who is asked, and in which order all are gone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from scripts.reaped import Reaped
from tests.batch.helpers import until

# A command that leaves a supervisor behind, which has a helper that must not be asked before it is.
LEAVES = """
import os, signal, subprocess, sys, time
folder = sys.argv[1]

def write(name):
    with open(os.path.join(folder, "said"), "a") as file:
        file.write(name + "\\n")

def ready(name):
    open(os.path.join(folder, name), "w").write(str(os.getpid()))
    while True:
        time.sleep(0.05)

if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, lambda *_: write("helper was asked"))
    ready("helper")
if os.fork() == 0:
    os.setsid()
    helper = subprocess.Popen([sys.executable, __file__, folder, "helper"], start_new_session=True)

    def end(*_):
        time.sleep(0.5)
        helper.kill()
        helper.wait()
        write("supervisor ended its helper")
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    ready("supervisor")
"""


def test_what_is_left_behind_ends_in_the_order_of_its_own(tmp_path: Path) -> None:
    """A helper that holds shared memory for the others must be the last, and only the supervisor knows that."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    reaped = Reaped()
    command = [sys.executable, str(script), str(tmp_path)]
    reaped.start(command, env=dict(os.environ), log=tmp_path / "log")
    until(lambda: (tmp_path / "helper").exists() and (tmp_path / "supervisor").exists())
    left = reaped.end(1.0)
    assert len(left) == 2, left
    assert (tmp_path / "said").read_text() == "supervisor ended its helper\n"
