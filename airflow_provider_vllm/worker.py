"""What the worker and the task instance add to a spec: settings, names and secrets from Airflow.

Enters: Airflow's configuration, connections and the context. Leaves: a state root, a server id and
LaunchOptions, which are all that the rooms `server/` and `batch/` get of Airflow.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, BaseHook, conf

from airflow_provider_vllm.exceptions import InvalidSpec

if TYPE_CHECKING:
    from airflow_provider_vllm.server.launch import LaunchOptions
    from airflow_provider_vllm.server.state import StateRoot
    from airflow_provider_vllm.spec import ServerSpec


def state_root() -> StateRoot:
    """The state root of this worker, `[vllm] state_root`. Raises InsecurePath."""
    from airflow_provider_vllm.server.state import StateRoot

    return StateRoot(state_root_path())


def state_root_path() -> str:
    """`[vllm] state_root`, by default AIRFLOW_HOME/vllm. Raises InvalidSpec for a relative path."""
    configured = conf.get("vllm", "state_root", fallback="")
    if configured:
        path = os.path.expanduser(os.path.expandvars(configured))
        if not os.path.isabs(path):
            raise InvalidSpec(
                f"[vllm] state_root is {configured!r}, which depends on where a process was started: give an "
                "absolute path."
            )
        return path
    home = os.environ.get("AIRFLOW_HOME") or "~/airflow"
    return os.path.join(os.path.expanduser(home), "vllm")


def default_python() -> str:
    """The interpreter that has vLLM on this worker: `[vllm] python`, else the running one."""
    return conf.get("vllm", "python", fallback="") or sys.executable


def keep_failed_days() -> float:
    """`[vllm] keep_failed_days`. Raises InvalidSpec."""
    text = conf.get("vllm", "keep_failed_days", fallback="") or "7"
    try:
        days = float(text)
    except ValueError:
        days = -1
    if not days >= 0:
        raise InvalidSpec(f"[vllm] keep_failed_days is {text!r}: give a number of days from 0.")
    return days


def server_id(context: Mapping[str, Any]) -> str:
    """The server of a task instance: the same in each try, another one for each map index and run."""
    ti = context["ti"]
    parts = (ti.dag_id, ti.run_id, ti.task_id, str(ti.map_index))
    readable = re.sub(r"[^a-z0-9]+", "-", f"{ti.dag_id}-{ti.task_id}".lower()).strip("-")[:60]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{readable.strip('-') or 'task'}-{digest}"


def run_label(context: Mapping[str, Any]) -> str:
    """The DAG run of a task instance, with its dag."""
    ti = context["ti"]
    return f"{ti.dag_id} {ti.run_id}"


def task_label(context: Mapping[str, Any]) -> str:
    """The task instance for people: dag, task, run, map index and try."""
    ti = context["ti"]
    mapped = f"[{ti.map_index}]" if ti.map_index >= 0 else ""
    return f"{ti.dag_id}.{ti.task_id}{mapped} {ti.run_id} try {ti.try_number}"


def secret(conn_id: str, field: str) -> str:
    """The password of a connection. Raises InvalidSpec naming the field of the spec."""
    try:
        password = BaseHook.get_connection(conn_id).password
    except AirflowNotFoundException:
        raise InvalidSpec(
            f"ServerSpec.{field} names the connection {conn_id!r}, which there is not. Make it, or correct the name."
        ) from None
    if not password:
        raise InvalidSpec(
            f"ServerSpec.{field} names the connection {conn_id!r}, which has no password."
        )
    return password


def launch_options(spec: ServerSpec, context: Mapping[str, Any]) -> LaunchOptions:
    """The worker's part of a launch; the server ends with this process until it is released."""
    from airflow_provider_vllm.server.launch import LaunchOptions
    from airflow_provider_vllm.server.processes import this_process

    return LaunchOptions(
        python=default_python(),
        owner=this_process(),
        task=task_label(context),
        key=secret(spec.auth_conn_id, "auth_conn_id") if spec.auth_conn_id else None,
        hf_token=secret(spec.hf_conn_id, "hf_conn_id") if spec.hf_conn_id else None,
        keep_failed_days=keep_failed_days(),
    )


def journal_dir(context: Mapping[str, Any]) -> str:
    """Where a batch without an output file keeps its answers for the next try, on this worker.

    Journals of tasks that have not come back for `[vllm] keep_failed_days` are removed here.
    """
    from airflow_provider_vllm.server.private import private_dir

    folder = private_dir(state_root().path / "batches")
    mine = folder / server_id(context)
    # A journal that is written to now is never older than a day.
    oldest = time.time() - max(1.0, keep_failed_days()) * 86400
    for journal in folder.iterdir():
        with contextlib.suppress(OSError):  # another task removes the same, or writes to it
            if journal != mine and _last_written(journal) < oldest:
                shutil.rmtree(journal)
    return str(mine)


def _last_written(folder: Path) -> float:
    return max(each.lstat().st_mtime for each in (folder, *folder.iterdir()))


def in_kubernetes_pod(executor: str | None) -> bool:
    """Whether the task runs in a pod of its own, which ends with it."""
    if os.environ.get("AIRFLOW_IS_K8S_EXECUTOR_POD"):
        return True
    name = executor or conf.get("core", "executor", fallback="").split(",")[0]
    return "KubernetesExecutor" in name
