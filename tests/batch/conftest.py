"""A fake endpoint for every test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec  # type: ignore[import-untyped]
import pytest

from tests.batch.helpers import ForeignLink, run
from tests.batch.matrix import outputs, spec_of
from tests.fakes.endpoint import Behaviour, ThreadedEndpoint


@pytest.fixture
def server() -> Iterator[ThreadedEndpoint]:
    """A well-behaved endpoint in a thread; a test changes `server.behaviour`."""
    with ThreadedEndpoint(Behaviour()) as endpoint:
        yield endpoint


@pytest.fixture
def empty_bucket() -> Iterator[None]:
    """Nothing in fsspec's memory file system, before and after."""
    store = fsspec.filesystem("memory").store
    store.clear()
    yield
    store.clear()


@pytest.fixture
def link(server: ThreadedEndpoint) -> ForeignLink:
    return ForeignLink(server.base_url)


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The output files of an undisturbed run."""
    folder = tmp_path_factory.mktemp("quiet")
    with ThreadedEndpoint(Behaviour()) as server:
        run(spec_of(folder), ForeignLink(server.base_url), folder)
    return outputs(folder)
