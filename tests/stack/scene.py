"""What the scenarios of this folder share: a registry, a way to trigger runs, prompts and their answers.

A scenario is a function that triggers a run, acts like a person at the UI (through the REST API) or like a
fault, and asserts what is seen and that nothing is left. They spend their time waiting for Airflow, so
`side_by_side` runs several at once; each test reports its own. docs/what-you-see.md has a row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.airflow_stack import AirflowStack
from tests.server.conftest import fake_spec
from tests.stack.observed import Observed, no_strays

SIDE_BY_SIDE = 4
QUICK = ["quick one", "quick two", "quick three"]
# Two rows at a time; the quick ones are answered when the slow ones are in flight.
TWO_AT_A_TIME = {"concurrency": 2, "pack": 1, "progress_interval": 2, "max_error_rate": 0}
SLOW = [*QUICK, *(f"[[slow 120]] row {number}" for number in range(4))]
SOME_SECONDS = [*QUICK, *(f"[[slow 3]] row {number}" for number in range(6))]

Scenario = Callable[["Scene"], None]


class Scenarios(dict[str, Scenario]):
    """Scenarios by name; use it as a decorator."""

    def __call__(self, function: Scenario) -> Scenario:
        self[function.__name__] = function
        return function


class Scene:
    """What a scenario gets: a way to trigger runs, and a folder of its own."""

    def __init__(self, stack: AirflowStack, folder: Path) -> None:
        self._stack, self.folder = stack, folder

    def run(
        self,
        dag_id: str,
        plan: dict[str, Any] | None = None,
        *,
        prompts: list[Any] | None = None,
        batch: dict[str, Any] | None = None,
        **spec: Any,
    ) -> Observed:
        plan = {"orphan_session": True, **(plan or {})}
        if "fail_times" in plan:
            plan["counter"] = str(self.folder / "starts")
        conf = {
            "spec": fake_spec(plan, **spec).to_json(),
            "prompts": QUICK if prompts is None else prompts,
            "batch": {**TWO_AT_A_TIME, **(batch or {})},
        }
        return Observed(self._stack, dag_id, conf)


@contextmanager
def side_by_side(
    scenarios: Scenarios, request: pytest.FixtureRequest, stack: AirflowStack, folder: Path
) -> Iterator[dict[str, Future[None]]]:
    """The selected scenarios of a module, all of them over; afterwards no server may be left."""
    chosen = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    }
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        running = {
            name: pool.submit(each, Scene(stack, own_folder(folder, name)))
            for name, each in scenarios.items()
            if name in chosen
        }
    yield running
    no_strays(stack)


def own_folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def answers_of(run: Observed, task_id: str = "work") -> list[str]:
    """The prompts whose answers a batch returned, in order: the fake repeats the prompt in the answer."""
    return [answer.partition(" to user: ")[2] for answer in run.xcom(task_id)]


def start_of(prompts: list[str]) -> list[str]:
    """What the fake repeats of each prompt."""
    return [f"user: {prompt}"[:40].removeprefix("user: ") for prompt in prompts]
