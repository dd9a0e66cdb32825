"""A real Airflow for the tests in this folder.

`stack` is one Airflow for the whole session: starting it takes longer than most tests. It serves
the DAGs of `tests/stack/dags` and those of `dags/`. `make_stack` makes another one, for a test that
kills parts or needs settings of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.airflow_client import AirflowClient
from scripts.airflow_stack import AirflowStack
from scripts.example_airflow import example_airflow
from scripts.set_up import ROOT
from tests.stack import postgres

TEST_DAGS = Path(__file__).with_name("dags")
MakeStack = Callable[..., AirflowStack]


@pytest.fixture(scope="session")
def shared_airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowStack]:
    home = tmp_path_factory.mktemp("airflow")
    with example_airflow(home, [TEST_DAGS, ROOT / "dags"]) as stack:
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
    """Call it to get a started Airflow of the test's own (arguments as in AirflowStack); it is
    stopped after the test, which fails when a server is left."""
    made: list[AirflowStack] = []

    def make(dag_folders: Sequence[Path] = (TEST_DAGS,), **further: Any) -> AirflowStack:
        made.append(example_airflow(tmp_path / f"airflow-{len(made)}", dag_folders, **further))
        made[-1].start()
        return made[-1]

    yield make
    left = [line for stack in made for line in stack.stop()]
    assert left == []


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """The URL of an empty database in a PostgreSQL of the test's own."""
    if postgres.program("postgres") is None:
        pytest.skip("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # a path short enough for a socket in it
    try:
        with postgres.running(folder) as url:
            yield url
    finally:
        shutil.rmtree(folder)
