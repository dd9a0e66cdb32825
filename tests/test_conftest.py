"""What a run of tests prints of its own: tests that need a GPU, servers of a test that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.set_up import ROOT
from tests import evidence

GPU = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    raise AssertionError

def test_anywhere():
    pass
"""
FAILS = """
from tests.server.conftest import fake_spec, servers

def test_that_fails(servers):
    servers.start(fake_spec())
    raise AssertionError
"""
# Whatever this machine has, the tests see none.
CONFTEST = """
from tests import conftest
conftest.gpu_present = lambda: False
from tests.conftest import *
"""


def run(tests: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest on one file of tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(tests)
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_marked_gpu_is_named_as_not_run(tmp_path: Path) -> None:
    done = run(GPU, tmp_path)
    assert done.returncode == 0, done.stdout
    _, _, closing = done.stdout.partition("marked gpu, not run")
    assert closing.splitlines()[1] == "test_some.py::test_on_a_gpu"
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]


def test_a_failure_shows_the_servers_of_that_test(tmp_path: Path) -> None:
    done = run(FAILS, tmp_path)
    assert "1 failed" in done.stdout.splitlines()[-1]
    _, _, shown = done.stdout.partition("- servers -")
    assert ": ready, reason None" in shown
    assert "vllm.log: (EngineCore pid=" in shown


def test_a_state_that_cannot_be_read_is_part_of_the_evidence(tmp_path: Path) -> None:
    """An error there would end the whole run, and take every other result with it."""
    odd = tmp_path / "servers" / "a" / "0001-b" / "state.json"
    odd.mkdir(parents=True)
    assert str(odd.parent) in evidence.of_servers(tmp_path, 0.0)
