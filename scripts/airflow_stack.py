"""A real Airflow for a demo or a test: its parts started one by one, and none left behind.

Enters: a home directory, folders of DAGs, settings. Leaves: a running scheduler (LocalExecutor),
DAG processor, triggerer and API server, and a client that is logged in. `airflow standalone` is
not used, since ending it leaves its children.

Invariants: each part runs in a session of its own under the reaper (reaper.py), which ends all of
them and all that they started when it is told to, or when this process is gone, killed too. What
was still alive after the parts had ended is returned by `stop`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from scripts.airflow_client import AirflowClient
from scripts.airflow_config import (
    API_SERVER_LOCK_S,
    USER,
    Settings,
    free_port,
    sqlite_url,
    write_config,
)
from scripts.progress import Note, Progress
from scripts.reaped import Reaped

PARTS = {
    "api-server": ["api-server"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}
HEALTHY = ("metadatabase", "scheduler", "dag_processor", "triggerer")
LOCK = "lock"
TAIL_CHARACTERS = 3000


class StackFailed(Exception):
    """A part of Airflow did not start or died; the message has the end of its log."""


class AirflowStack:
    """One Airflow in `home`, which is emptied first when `fresh`.

    `environ` is added to the environment of its parts, and so of tasks; `settings` and `database`
    as in airflow_config.py; `port` is the API server's, 0 takes a free one. Raises StackFailed when
    another Airflow runs in this home.
    """

    def __init__(
        self,
        home: Path,
        dag_folders: Sequence[Path],
        *,
        settings: Settings | None = None,
        environ: Mapping[str, str] | None = None,
        database: str | None = None,
        port: int = 0,
        fresh: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.home = home
        self.logs = home / "parts"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.pids: dict[str, int] = {}
        self._progress = progress or Progress()
        self._reaped = Reaped()
        home.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_home()
        if fresh:
            _empty(home)
        self.logs.mkdir(exist_ok=True)
        self._on_sqlite = database is None
        self.password = write_config(
            home, dag_folders, settings or {}, port=self.port, database=database
        )
        self._environ = {**_inherited(), **(environ or {}), "AIRFLOW_HOME": str(home)}
        self.client = AirflowClient(self.url, USER, self.password, say=self._progress.say)

    def start(self, timeout: float = 120.0) -> None:
        """Make the database where it is missing, start the parts, wait until all are healthy.

        Raises StackFailed.
        """
        with self._progress.stage("Airflow's database"):
            self.run_command("db", "migrate")
        with self._progress.stage("Airflow's parts") as note:
            for name in PARTS:
                self.start_part(name)
            self._wait_until_healthy(timeout, note)

    def stop(self, grace: float = 6.0) -> list[str]:
        """End everything, parts that take longer than `grace` seconds by force. The command lines
        of what tasks had left behind, such as servers that nobody stopped. Safe before start and
        twice."""
        self.client.close()
        left = self._reaped.end(grace)
        self.pids.clear()
        self._lock.close()
        return left

    def start_part(self, name: str) -> int:
        """Start one part (a key of PARTS), for the first time or after it was killed; its pid."""
        command = [sys.executable, "-m", "airflow", *PARTS[name]]
        environ = dict(self._environ)
        if name == "api-server" and self._on_sqlite:
            url = sqlite_url(self.home, API_SERVER_LOCK_S)
            environ["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] = url
        self.pids[name] = self._reaped.start(command, env=environ, log=self.part_log(name))
        return self.pids[name]

    def strays(self) -> list[str]:
        """Command lines of what tasks started and left behind; it lives outside of all parts."""
        return self._reaped.strays(list(self.pids.values()))

    def dead_parts(self) -> list[str]:
        """Names of the parts that were started and have gone."""
        return [name for name, pid in self.pids.items() if not Path(f"/proc/{pid}").exists()]

    def part_log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def run_command(self, *arguments: str, timeout: float = 120.0) -> str:
        """Run `airflow ...` in this home; what it printed. Raises StackFailed."""
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *arguments],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            said = done.stdout[-TAIL_CHARACTERS:]
            raise StackFailed(f"airflow {' '.join(arguments)}: status {done.returncode}:\n{said}")
        return done.stdout

    def __enter__(self) -> AirflowStack:
        try:
            self.start()
        except BaseException:
            self.stop(grace=0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _take_home(self) -> IO[str]:
        lock = (self.home / LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StackFailed(f"Another Airflow runs in {self.home}: end that one first.") from None
        return lock

    def _wait_until_healthy(self, timeout: float, note: Note) -> None:
        deadline = time.monotonic() + timeout
        while True:
            status = self.client.healthy()
            missing = [part for part in HEALTHY if status.get(part) != "healthy"]
            if not missing:
                note.text = ""
                return
            note.text = f"waiting for {', '.join(missing)}"
            self._raise_for_dead_parts()
            if time.monotonic() > deadline:
                raise StackFailed(f"not healthy after {timeout:.0f} s: {missing}; {self.logs}")
            time.sleep(0.3)

    def _raise_for_dead_parts(self) -> None:
        for name in self.dead_parts():
            said = self.part_log(name).read_text(errors="replace")[-TAIL_CHARACTERS:]
            raise StackFailed(f"{name} died at start; {self.part_log(name)} ends:\n{said}")


def _empty(home: Path) -> None:
    for path in home.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _inherited() -> dict[str, str]:
    """This process's environment without what would make this Airflow part of another one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
