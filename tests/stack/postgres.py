"""A private PostgreSQL for one test, where it is installed: Airflow's database in the chaos tests.

Enters: an empty directory. Leaves: a SQLAlchemy URL. It listens on a socket in that directory
only, and ends with the test, also when the test is killed. PostgreSQL refuses to run as root, so
it then runs as `nobody`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.reaped import Reaped

START_S = 30.0
# Debian keeps the server's programs out of PATH.
PLACES = (*Path("/usr/lib/postgresql").glob("*/bin"), *Path("/usr").glob("pgsql-*/bin"))


def program(name: str) -> str | None:
    """The path of one of PostgreSQL's programs, None where it is not installed."""
    path = os.pathsep.join([os.environ["PATH"], *map(str, PLACES)])
    return shutil.which(name, path=path)


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Run a new PostgreSQL in `folder` (whose path has to be short: it holds a socket)."""
    user = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None
    if user is not None:
        os.chown(folder, user, -1)
    data, host = str(folder / "data"), str(folder)
    _run("initdb", "--auth", "trust", "--username", "airflow", "--pgdata", data, user=user)
    options = ["listen_addresses=", f"unix_socket_directories={host}", "fsync=off"]
    settings = [word for option in options for word in ("-c", option)]
    reaped = Reaped()
    try:
        reaped.start(
            [str(program("postgres")), "-D", data, *settings],
            env={"PATH": os.environ["PATH"]},
            log=folder / "log",
            user=user,
            end_signal=signal.SIGINT,  # without waiting for its clients
        )
        _wait_until_ready(host, folder / "log")
        _run("createdb", "--host", host, "--username", "airflow", "airflow", user=user)
        yield f"postgresql+psycopg2://airflow@/airflow?host={host}"
    finally:
        reaped.end(grace=10)


def _wait_until_ready(host: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while subprocess.run([str(program("pg_isready")), "--quiet", "--host", host]).returncode:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _run(name: str, *arguments: str, user: int | None) -> None:
    command = program(name)
    assert command is not None, f"{name} of PostgreSQL is not installed"
    subprocess.run(
        [command, *arguments],
        user=user,
        cwd="/",
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
