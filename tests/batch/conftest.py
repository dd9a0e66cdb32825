"""A fake endpoint for every test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.batch.helpers import ForeignLink
from tests.fakes.endpoint import Behaviour, ThreadedEndpoint


@pytest.fixture
def server() -> Iterator[ThreadedEndpoint]:
    """A well-behaved endpoint in a thread; a test changes `server.behaviour`."""
    with ThreadedEndpoint(Behaviour()) as endpoint:
        yield endpoint


@pytest.fixture
def link(server: ThreadedEndpoint) -> ForeignLink:
    return ForeignLink(server.base_url)
