"""Folders and files of our own: made so, or refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from airflow_provider_vllm.exceptions import InsecurePath
from airflow_provider_vllm.server.private import check_private_dir, open_private, private_dir


def test_a_folder_is_made_for_the_user_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = private_dir(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert private_dir(made) == made
    with pytest.raises(FileNotFoundError):
        check_private_dir(tmp_path / "none")


def test_a_file_is_made_for_the_user_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        fd = open_private(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_private(tmp_path / "none", os.O_RDONLY)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    tmp_path: Path, flags: int
) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InsecurePath, match=str(tmp_path / "pipe")):
        open_private(tmp_path / "pipe", flags)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    for flags in (os.O_RDONLY, os.O_RDWR):
        with pytest.raises(InsecurePath):
            open_private(tmp_path / "folder", flags)


def test_a_dangling_symlink_creates_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(InsecurePath, match="symbolic link"):
        open_private(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "target").exists()
