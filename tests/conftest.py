"""Common to all tests: what is run where, where the set-up put things, and that tests end clean."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from scripts.models import INSTRUCT, TINY
from scripts.set_up import MODELS, ROOT, gpu_present
from tests import evidence
from tests.leftovers import Snapshot, adopt_orphans

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TEMPORARY = pytest.StashKey[Path]()  # all temporary folders of the tests are below it
NO_GPU = pytest.mark.skip(reason="needs an NVIDIA GPU, and none is present")


def pytest_configure() -> None:
    adopt_orphans()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not gpu_present():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(NO_GPU)


def pytest_make_parametrize_id(val: object) -> str | None:
    """gzip writes the time of day into its head: a test's id must be the same in each process."""
    return "gzip" if isinstance(val, bytes) and val.startswith(b"\x1f\x8b") else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests need a GPU and so were not run: their claims are not checked here."""
    skipped = terminalreporter.stats.get("skipped", [])
    not_run = [report.nodeid for report in skipped if "gpu" in report.keywords]
    terminalreporter.section("marked gpu, not run: no NVIDIA GPU here")
    for nodeid in not_run or ["none"]:
        terminalreporter.line(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure is printed with the servers that the test started: most are gone a moment later."""
    report = yield
    if report.failed and TEMPORARY in item.config.stash:
        servers = evidence.of_servers(item.config.stash[TEMPORARY], call.start)
        report.sections += [("servers", servers)] if servers else []
    return report


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    request.config.stash[TEMPORARY] = tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def ends_clean() -> Iterator[None]:
    """Fails a test that leaves a process or a shared memory segment of vLLM behind, and ends it."""
    before = Snapshot()
    yield
    if left := before.leftovers():
        before.end_processes()
        pytest.fail("The test left behind:\n  " + "\n  ".join(left))


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM."""
    return _made_by_setup(VLLM_PYTHON)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A random Llama that loads in a blink and answers nonsense."""
    return _made_by_setup(MODELS / TINY)


@pytest.fixture(scope="session")
def instruct_model() -> Path:
    """A real small instruct model."""
    return _made_by_setup(MODELS / INSTRUCT)


def _made_by_setup(path: Path) -> Path:
    assert path.exists(), f"{path} is missing; `make setup` makes it"
    return path
