"""What of /dev/shm is a server's own, and what is never removed."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_vllm.server import segments
from airflow_provider_vllm.server.segments import SHM, mapped, remove

MAP = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(60)
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    path = SHM / f"test-segment-{secrets.token_hex(4)}"
    path.write_bytes(b"\0" * 4096)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def mapper(segment: Path) -> Iterator[subprocess.Popen]:
    """A process that has the segment mapped."""
    with subprocess.Popen(
        [sys.executable, "-c", MAP, segment], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "mapped\n"
        yield process
        process.kill()


def test_one_that_a_process_maps_is_seen_and_kept(segment: Path, mapper: subprocess.Popen) -> None:
    assert mapped([mapper.pid]) == {segment.name}
    assert remove([segment.name]) == []
    assert segment.exists()
    mapper.kill()
    mapper.wait()
    assert remove([segment.name]) == [segment.name]
    assert not segment.exists()


def test_one_that_is_unlinked_already_is_no_segment(
    segment: Path, mapper: subprocess.Popen
) -> None:
    segment.unlink()
    assert mapped([mapper.pid]) == set()


def test_a_symlink_is_kept(segment: Path, tmp_path: Path) -> None:
    segment.unlink()
    target = tmp_path / "precious"
    target.write_text("x")
    segment.symlink_to(target)
    assert remove([segment.name]) == []
    assert segment.is_symlink()
    assert target.exists()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../etc/hostname", "/etc/hostname", "a/b", "no-such-segment"]
)
def test_a_name_that_is_no_file_of_ours_is_kept(name: str) -> None:
    assert remove([name]) == []


def test_a_folder_is_kept(segment: Path) -> None:
    segment.unlink()
    segment.mkdir()
    try:
        assert remove([segment.name]) == []
        assert segment.is_dir()
    finally:
        segment.rmdir()
        segment.touch()


def test_one_of_another_user_is_kept(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(segment, 65534, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert remove([segment.name]) == []
    assert segment.exists()


def test_a_path_that_only_ends_like_one_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "dev" / "shm"
    fake.mkdir(parents=True)
    (fake / "psm_x").write_bytes(b"\0" * 4096)
    with subprocess.Popen(
        [sys.executable, "-c", MAP, fake / "psm_x"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        assert mapped([process.pid]) == set()
        process.kill()


def test_processes_that_are_gone_map_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        pass
    assert segments.mapped([process.pid]) == set()
