"""Exercises the test stack itself: XCom, mapped tasks, a retry, a process left behind, a kill."""

from __future__ import annotations

import subprocess
from datetime import timedelta

from airflow.sdk import dag, get_current_context, task


@dag(schedule=None, catchup=False)
def stack_check() -> None:
    @task
    def numbers() -> list[int]:
        conf = get_current_context()["dag_run"].conf or {}
        return conf.get("numbers", [1, 2])

    @task
    def double(number: int) -> int:
        print(f"doubling {number}")
        return 2 * number

    @task(retries=1, retry_delay=timedelta(0))
    def fails_once() -> None:
        if get_current_context()["ti"].try_number == 1:
            raise RuntimeError("the first try fails on purpose")

    double.expand(number=numbers()) >> fails_once()


@dag(schedule=None, catchup=False)
def stack_leaves_a_process() -> None:
    @task
    def leave() -> int:
        process = subprocess.Popen(
            ["sleep", "600"],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return process.pid

    leave()


@dag(schedule=None, catchup=False)
def stack_waits() -> None:
    """Runs until it is killed, marked or cleared."""

    @task
    def wait() -> None:
        subprocess.run(["sleep", "600"], check=True)

    wait()


stack_check()
stack_leaves_a_process()
stack_waits()
