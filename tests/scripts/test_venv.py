"""An environment is left alone when it fits, and made again when its set-up was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.progress import Note
from scripts.venv import InstallFailed, PipSteps, Venv


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "env", tmp_path / "logs")


def test_holds_what_was_asked_for_and_nothing_else(venv: Venv) -> None:
    assert not venv.holds("one")
    with venv.building("one"):
        assert not venv.holds("one")
    assert venv.holds("one")
    assert not venv.holds("one", "two")


def test_other_packages_are_added_and_an_interrupted_set_up_starts_over(venv: Venv) -> None:
    with venv.building("one"):
        pass
    mark = venv.path / "mark"
    mark.touch()

    with pytest.raises(KeyboardInterrupt), venv.building("two"):
        raise KeyboardInterrupt
    assert mark.exists()
    assert not venv.holds("one")
    assert not venv.holds("two")

    with venv.building("two"):
        assert not mark.exists()
    assert venv.holds("two")


def test_one_whose_interpreter_is_gone_is_made_again(venv: Venv) -> None:
    with venv.building("one"):
        pass
    venv.python.unlink()
    assert not venv.holds("one")
    with venv.building("one"):
        pass
    assert venv.holds("one")


def test_what_a_link_leads_to_is_left_alone(venv: Venv, tmp_path: Path) -> None:
    """An environment of another checkout: to make this one's there would empty it."""
    other = Venv(tmp_path / "other", tmp_path / "logs")
    with other.building("one"):
        pass
    venv.path.symlink_to(other.path)
    assert not venv.holds("one")
    with venv.building("one"):
        pass
    assert venv.holds("one") and not venv.path.is_symlink()
    assert other.holds("one")


def test_a_failure_says_what_pip_said_and_where_the_log_is(venv: Venv) -> None:
    with pytest.raises(InstallFailed) as failed, venv.building("none"):
        venv.install(["--no-index", "no-such-package-anywhere"], Note())
    assert "no-such-package-anywhere" in str(failed.value)
    assert "set-upenv.log" in str(failed.value)
    assert not venv.holds("none")


def test_the_steps_of_pip_are_told_in_a_few_words(tmp_path: Path) -> None:
    steps = PipSteps(tmp_path)
    assert steps.after("Collecting torch==2.13.0+cpu\n") == "resolving, 1 packages so far"
    fetching = "  Downloading torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (200.1 MB)\n"
    assert steps.after(fetching) == "1 packages so far, fetching torch (200.1 MB)"
    unpacking = steps.after("Installing collected packages: a, b, torch\n")
    assert callable(unpacking)
    assert unpacking() == "unpacked 0 of 3 packages"
    (tmp_path / "lib" / "python3.11" / "site-packages" / "a-1.dist-info").mkdir(parents=True)
    assert unpacking() == "unpacked 1 of 3 packages"
    assert steps.after("Successfully installed a-1 b-2 torch-2.13.0\n") == ""
