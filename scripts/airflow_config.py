"""airflow.cfg for one private Airflow: its own home, free ports, LocalExecutor.

Enters: a home directory, folders of DAGs and overrides by section. Leaves: airflow.cfg and the
password file, both readable by their owner alone, since they hold the keys that tasks and users are
let in by.
"""

from __future__ import annotations

import base64
import configparser
import io
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

USER = "admin"
# A scheduler that meets a locked SQLite database ends. The API server can lock itself out (3.3.2
# writes its audit log in the event loop), and nobody gets on until it has given up: that has to
# be sooner.
LOCK_S, API_SERVER_LOCK_S = 60, 2
Settings = Mapping[str, Mapping[str, str]]


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_config(
    home: Path, dag_folders: Sequence[Path], settings: Settings, *, port: int, database: str | None
) -> str:
    """Write airflow.cfg and the password file into `home`; the admin user's password.

    `settings` (section -> option -> value) wins over what is written here. `database` is an
    SQLAlchemy URL, SQLite in `home` where it is None. Secrets that are there already are kept: the
    database holds what was encrypted with them.
    """
    passwords, path = home / "passwords.json", home / "airflow.cfg"
    if not passwords.exists():
        write_private(passwords, json.dumps({USER: secrets.token_urlsafe(16)}))
    before = configparser.RawConfigParser()
    before.read(path)
    parser = configparser.RawConfigParser()
    for section, options in _secrets().items():
        kept = {each: before.get(section, each, fallback=fresh) for each, fresh in options.items()}
        parser.read_dict({section: kept})
    parser.read_dict(_defaults(home, dag_folders, port, database, passwords))
    parser.read_dict(settings)
    text = io.StringIO()
    parser.write(text)
    write_private(path, text.getvalue())
    return json.loads(passwords.read_text())[USER]


def sqlite_url(home: Path, lock_timeout: int) -> str:
    """The database in `home`; who finds it locked waits for `lock_timeout` seconds."""
    return f"sqlite:///{home / 'airflow.db'}?timeout={lock_timeout}"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _secrets() -> dict[str, dict[str, str]]:
    """Fresh ones, by section and option."""
    return {
        "core": {"fernet_key": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()},
        "api": {"secret_key": secrets.token_urlsafe(32)},
        "api_auth": {"jwt_secret": secrets.token_urlsafe(64)},
    }


def _defaults(
    home: Path, dag_folders: Sequence[Path], port: int, database: str | None, passwords: Path
) -> dict[str, dict[str, str]]:
    bundles = [
        {
            "name": folder.name if number == 0 else f"{folder.name}-{number}",
            "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
            "kwargs": {"path": str(folder), "refresh_interval": 5},
        }
        for number, folder in enumerate(dag_folders)
    ]
    return {
        "core": {
            "executor": "LocalExecutor",
            # Each is a forked process from the start; the examples and tests need no more.
            "parallelism": "6",
            "load_examples": "False",
            "dags_folder": str(dag_folders[0]),
            "execution_api_server_url": f"http://127.0.0.1:{port}/execution/",
            "simple_auth_manager_users": f"{USER}:admin",
            "simple_auth_manager_passwords_file": str(passwords),
        },
        "api": {
            "host": "127.0.0.1",
            "port": str(port),
            "base_url": f"http://127.0.0.1:{port}",
            "workers": "1",
        },
        "database": {"sql_alchemy_conn": database or sqlite_url(home, LOCK_S)},
        "logging": {"base_log_folder": str(home / "logs")},
        "dag_processor": {
            "dag_bundle_config_list": json.dumps(bundles),
            "min_file_process_interval": "5",
            "bundle_refresh_check_interval": "2",
        },
        # A task that ends is followed by the next one sooner than with the default of a second.
        "scheduler": {"scheduler_idle_sleep_time": "0.2"},
    }
