"""What the closing summary says of tests that need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.set_up import ROOT

TESTS = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    raise AssertionError

def test_anywhere():
    pass
"""
# Whatever this machine has, the tests see none.
CONFTEST = """
from tests import conftest
conftest.gpu_present = lambda: False
from tests.conftest import *
"""


def test_what_is_marked_gpu_is_named_as_not_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    _, _, closing = done.stdout.partition("marked gpu, not run")
    assert closing.splitlines()[1] == "test_some.py::test_on_a_gpu"
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]
