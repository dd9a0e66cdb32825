"""The guard alone: what it starts, what it says, and when it ends the tree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from airflow_provider_vllm.server.guarded import GUARD
from airflow_provider_vllm.server.processes import ProcessId, descendants, identity_of
from tests.server.conftest import wait_for

# Ignores TERM, and has below it a child, and a grandchild that closed its streams and left the session.
TREE = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 3)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


@dataclass
class Guarded:
    """A guard with its pipes; `silence` in seconds."""

    process: subprocess.Popen
    control: int
    status: int
    log: Path
    extra: int

    def line(self) -> str:
        out = b""
        while not out.endswith(b"\n"):
            byte = os.read(self.status, 1)
            if not byte:
                return out.decode()
            out += byte
        return out.decode().strip()

    def say(self, byte: bytes) -> None:
        os.write(self.control, byte)

    def tree(self) -> list[ProcessId]:
        return [stat.identity for stat in descendants(self.process.pid)]

    def close(self) -> None:
        for name in ("control", "status"):
            if (fd := getattr(self, name)) >= 0:
                os.close(fd)
                setattr(self, name, -1)


Start = Callable[..., Guarded]


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Start]:
    started: list[Guarded] = []

    def start(
        *command: str, silence: float = 30.0, program: tuple[str, ...] = (str(GUARD),)
    ) -> Guarded:
        control_read, control = os.pipe()
        status, status_write = os.pipe()
        log, extra = tmp_path / "log", os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        with log.open("ab") as out:
            fds = (control_read, status_write, out.fileno())
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", *program, *map(str, fds), str(silence), *command],
                pass_fds=(*fds, extra),
                stderr=out,
                start_new_session=True,
            )
        for fd in (control_read, status_write, extra):
            os.close(fd)
        started.append(Guarded(process, control, status, log, extra))
        return started[-1]

    yield start
    for each in started:
        each.process.send_signal(signal.SIGCONT)
        each.close()
        each.process.wait(10)


def grown(one: Guarded) -> list[ProcessId]:
    """Its tree, once it is complete."""
    wait_for(lambda: len(one.tree()) == 3)
    return one.tree()


def test_the_end_of_the_supervisor_is_the_end_of_the_tree(guard: Start) -> None:
    one = guard(sys.executable, "-c", TREE)
    tree = grown(one)
    one.close()
    one.process.wait(5)
    assert not [process for process in tree if process.alive]


def test_so_is_its_silence(guard: Start) -> None:
    one = guard(sys.executable, "-c", TREE, silence=1.5)
    tree = grown(one)
    for _ in range(4):
        one.say(b"b")
        time.sleep(0.5)
    assert one.process.poll() is None
    one.process.wait(5)
    assert not [process for process in tree if process.alive]


def test_a_pause_of_the_whole_machine_is_no_silence(guard: Start) -> None:
    one = guard(sys.executable, "-c", TREE, silence=4)
    tree = grown(one)
    one.say(b"b")
    time.sleep(0.3)
    one.process.send_signal(signal.SIGSTOP)
    time.sleep(4.2)
    one.process.send_signal(signal.SIGCONT)
    time.sleep(1.2)
    for _ in range(3):
        one.say(b"b")
        time.sleep(0.3)
    assert one.process.poll() is None
    assert len([process for process in tree if process.alive]) == 3


def test_term_ends_the_tree_and_other_signals_do_nothing(guard: Start) -> None:
    one = guard(sys.executable, "-c", TREE)
    tree = grown(one)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
        one.process.send_signal(number)
    time.sleep(0.3)
    assert one.process.poll() is None
    one.process.terminate()
    one.process.wait(5)
    assert not [process for process in tree if process.alive]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_it_says_how_the_command_ended(guard: Start, code: str, status: int) -> None:
    one = guard(sys.executable, "-c", code)
    assert one.line().startswith("started ")
    assert one.line() == f"exit {status}"
    one.say(b"b")
    assert one.line() == "beat"


def test_a_command_that_is_no_program_ends_with_127_and_its_reason(guard: Start) -> None:
    one = guard("/no/such/program")
    one.line()
    assert one.line() == "exit 127"
    assert "guard: cannot start /no/such/program" in one.log.read_text()


def test_an_orphan_stays_below_it_and_is_killed_when_asked(guard: Start) -> None:
    one = guard(sys.executable, "-c", TREE)
    main = int(one.line().split()[1])
    tree = grown(one)
    os.kill(main, signal.SIGKILL)
    assert one.line() == "exit -9"
    assert len(one.tree()) == 2
    one.say(b"k")
    assert one.line() == "killed 0"
    assert not [process for process in tree if process.alive]
    assert one.process.poll() is None


def test_the_tree_holds_the_locks_and_none_of_the_pipes(guard: Start) -> None:
    one = guard(sys.executable, "-c", TREE)
    main = int(one.line().split()[1])
    grown(one)
    held = {os.readlink(f"/proc/{main}/fd/{fd}") for fd in os.listdir(f"/proc/{main}/fd")}
    assert held == {os.devnull, str(one.log), str(one.log.with_name("lock"))}
    assert os.getsid(main) == main


def test_a_supervisor_that_reads_no_more_is_no_reason_to_fail(guard: Start) -> None:
    one = guard(sys.executable, "-c", TREE)
    grown(one)
    os.close(one.status)
    one.status = -1
    for _ in range(3):
        one.say(b"b")
        time.sleep(0.1)
    assert one.process.poll() is None


def test_beats_that_pile_up_while_nobody_reads_the_echo(guard: Start) -> None:
    """More echoes than a pipe holds: none of them may block the guard."""
    one = guard(sys.executable, "-c", TREE)
    tree = grown(one)
    for _ in range(20_000):
        one.say(b"b")
    one.close()
    one.process.wait(5)
    assert not [process for process in tree if process.alive]
    assert identity_of(one.process.pid) is None


# The guard, to which no process ever gives its command line: each look waits for a pipe's other end.
BLIND = """
import os, runpy, sys
guard = runpy.run_path(sys.argv.pop(1), run_name="guard")
os.mkfifo(fifo := sys.argv.pop(1))
guard["look_at"].__globals__["command_of"] = lambda pid: open(fifo, "rb").read()
guard["main"](sys.argv)
"""


def test_processes_stuck_in_the_kernel_do_not_hold_it_up(guard: Start, tmp_path: Path) -> None:
    """Their command lines, in the memory that they have locked, never come."""
    program = ("-c", BLIND, str(GUARD), str(tmp_path / "fifo"))
    one = guard(sys.executable, "-c", TREE, program=program)
    tree = grown(one)
    began = time.monotonic()
    one.close()
    one.process.wait(5)
    assert time.monotonic() - began < 2
    assert not [process for process in tree if process.alive]
