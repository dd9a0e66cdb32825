"""A real Airflow for the tests under this folder and for those marked `stack`.

`stack` is one Airflow for the whole session: starting it takes longer than most tests. It serves
the DAGs of `tests/stack/dags` and those of `dags/`. `make_stack` makes another one, for a test that
kills parts or needs settings of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from scripts.airflow_client import AirflowClient
from scripts.airflow_config import Settings
from scripts.airflow_stack import AirflowStack
from scripts.example_airflow import example_environ, example_settings
from scripts.set_up import ROOT

TEST_DAGS = Path(__file__).with_name("dags")
MakeStack = Callable[..., AirflowStack]


@pytest.fixture(scope="session")
def shared_airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowStack]:
    home = tmp_path_factory.mktemp("airflow")
    stack = AirflowStack(
        home,
        [TEST_DAGS, ROOT / "dags"],
        settings=example_settings(home),
        environ=example_environ(home),
    )
    with stack:
        yield stack


@pytest.fixture
def stack(shared_airflow: AirflowStack) -> Iterator[AirflowStack]:
    """The session's Airflow; the test fails when a server that its tasks started is left."""
    yield shared_airflow
    assert shared_airflow.strays() == []


@pytest.fixture
def client(stack: AirflowStack) -> AirflowClient:
    """A logged-in user of the session's Airflow."""
    return stack.client


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[MakeStack]:
    """Call it to get an Airflow of the test's own, started; it is stopped after the test."""
    made: list[AirflowStack] = []

    def make(
        dag_folders: Sequence[Path] = (TEST_DAGS,),
        *,
        settings: Settings | None = None,
        environ: Mapping[str, str] | None = None,
        database: str | None = None,
    ) -> AirflowStack:
        home = tmp_path / f"airflow-{len(made)}"
        stack = AirflowStack(
            home,
            dag_folders,
            settings={**example_settings(home), **(settings or {})},
            environ={**example_environ(home), **(environ or {})},
            database=database,
        )
        made.append(stack)
        stack.start()
        return stack

    yield make
    left = [line for stack in made for line in stack.stop()]
    assert left == []
