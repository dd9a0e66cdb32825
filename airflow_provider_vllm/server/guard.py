"""The parent of the vLLM tree that ends it when the supervisor is gone.

    python -I -S guard.py CONTROL_FD STATUS_FD LOG_FD SILENCE_S COMMAND...

Enters: bytes on CONTROL_FD (`b` a heartbeat, `k` end the tree now). Leaves: lines on STATUS_FD:
`started PID`, `exit STATUS` (negative: a signal), `beat`, `killed LEFT`.

Invariants: the tree is ended when CONTROL_FD closes (supervisor killed), when no byte came for SILENCE_S
seconds in which the guard itself ran (supervisor frozen), and on SIGTERM. The guard is a sub-reaper, so
that an EngineCore whose API server was killed becomes its child and can't get away. Where guard and supervisor are
killed at once, the kernel asks vLLM to end (SIGTERM, which takes its engines along; SIGKILL would not). GPU locks are
descriptors that it and vLLM only hold open. It imports nothing of the package: it has to be small and
can't afford to fail.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TRACKERS_S = 1.0
LOOK_S = 0.3
ROUND_S = 1.0
LONGEST_ROUND_S = 2.0  # twice a round: a busy machine is not a paused one


def spawn(command, log_fd, own_fds):
    """Start the command in a new session with both streams into the log."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:
            os._exit(127)  # the guard was killed before it could count
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        for fd in (*own_fds, null, log_fd):
            if fd > 2:
                os.close(fd)
        os.execvp(command[0], command)
    except BaseException as exc:
        os.write(2, f"guard: cannot start {command[0]}: {exc}\n".encode())
    finally:
        os._exit(127)


def prctl(option, value):
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def children_of(parents):
    """Pids of all processes below these, from /proc."""
    parent_of = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", errors="replace") as stat:
                    parent_of[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
    found, todo = [], list(parents)
    while todo:
        parent = todo.pop()
        below = [pid for pid, its_parent in parent_of.items() if its_parent == parent]
        found += below
        todo += below
    return found


def kill_tree(seconds=5.0):
    """SIGKILL whatever is below us until nothing is left; how many are left after `seconds`.

    By parent, not by process group: once its leader was reaped, a group's number may be another's.
    Python's resource trackers come last: each removes the shared memory and semaphores of those it
    worked for, and ends, as soon as they are gone.
    """
    deadline = time.monotonic() + seconds
    alone_since = deadline  # since when only trackers are left
    trackers: dict[int, bool] = {}
    while True:
        below = children_of([os.getpid()])
        look_at([pid for pid in below if pid not in trackers], trackers)
        others = [pid for pid in below if not trackers[pid]]
        if not others:
            alone_since = min(alone_since, time.monotonic())
        spared = others or time.monotonic() - alone_since < TRACKERS_S
        for pid in others if spared else below:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # gone already, or another user's by a set-uid program: it counts as left
        reap()
        left = len(children_of([os.getpid()]))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def look_at(pids, trackers):
    """Note for each of these pids whether it is a resource tracker of Python's multiprocessing.

    A process that is stuck in the kernel may never give its command line: it counts as none, and so do
    those that would have been asked after it.
    """

    def look():
        for pid in pids:
            found[pid] = b"multiprocessing.resource_tracker" in command_of(pid)

    found: dict[int, bool] = {}
    if pids:
        thread = threading.Thread(target=look, daemon=True)
        try:
            thread.start()
            thread.join(LOOK_S)
        except RuntimeError:
            pass  # no more threads for this user or container
    trackers.update({pid: found.get(pid, False) for pid in pids})


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return command.read()
    except OSError:
        return b""


def reap():
    """Collect every child that has ended: {pid: exit status}."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


class Guard:
    def __init__(self, control_fd, status_fd, log_fd, silence, command):
        self.control_fd, self.status_fd, self.silence = control_fd, status_fd, silence
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        os.set_blocking(self.wake_read, False)
        os.set_blocking(status_fd, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        self.terminated = False
        signal.signal(signal.SIGTERM, self.on_term)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.child = spawn(
            command, log_fd, (control_fd, status_fd, self.wake_read, self.wake_write)
        )
        os.close(log_fd)
        self.say(f"started {self.child}")

    def on_term(self, *_):
        self.terminated = True

    def say(self, line):
        try:
            os.write(self.status_fd, line.encode() + b"\n")
        except OSError:
            pass  # nobody reads any more: the control pipe tells us the rest

    def run(self):
        # Silence is counted in the time that this process itself ran: a machine or container that
        # was paused as a whole must not count as a supervisor that went silent.
        silent, now = 0.0, time.monotonic()
        while True:
            readable, _, _ = select.select([self.control_fd, self.wake_read], [], [], ROUND_S)
            if self.wake_read in readable:
                os.read(self.wake_read, 512)
            ended = reap()
            if self.child in ended:
                self.say(f"exit {ended[self.child]}")
                self.child = 0  # its pid may be used again
            before, now = now, time.monotonic()
            silent += min(now - before, LONGEST_ROUND_S)
            if self.control_fd in readable:
                data = os.read(self.control_fd, 4096)
                if not data:
                    return
                silent = 0.0
                if b"k" in data:
                    self.say(f"killed {kill_tree()}")
                if b"b" in data:
                    self.say("beat")
            if self.terminated or silent > self.silence:
                return


def main(argv):
    control_fd, status_fd, log_fd = (int(word) for word in argv[1:4])
    guard = Guard(control_fd, status_fd, log_fd, float(argv[4]), argv[5:])
    try:
        guard.run()
    finally:
        kill_tree()


if __name__ == "__main__":
    main(sys.argv)
