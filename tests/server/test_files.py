"""Files are private, and whole or not there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airflow_provider_vllm.server.files import create_private, read_json, write_json, write_private

WRITER = """
import sys
from pathlib import Path
from airflow_provider_vllm.server.files import write_json
path = Path(sys.argv[1])
number = 0
while True:
    number += 1
    write_json(path, {"number": number, "padding": "x" * 300_000, "again": number})
"""


def test_a_reader_never_sees_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with subprocess.Popen([sys.executable, "-c", WRITER, path]) as writer:
        try:
            seen: set[int] = set()
            deadline = time.monotonic() + 10
            while len(seen) < 20:
                assert time.monotonic() < deadline
                if path.exists():
                    data = read_json(path)
                    assert data is not None
                    assert data["number"] == data["again"]
                    seen.add(data["number"])
        finally:
            writer.kill()


def test_the_mode_is_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_json(tmp_path / "a", {})
        assert create_private(tmp_path / "b", "x")
    finally:
        os.umask(old)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"} == {0o600}


def test_a_symlink_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "link").symlink_to(target)
    write_private(tmp_path / "link", "new")
    assert target.read_text() == "precious"
    assert (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()


def test_only_the_first_creates(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert create_private(path, "first")
    assert not create_private(path, "second")
    assert path.read_text() == "first"


def test_nothing_is_left_where_it_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_private(tmp_path / "folder", "x")
    with pytest.raises(FileNotFoundError):
        write_private(tmp_path / "missing" / "x", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"1", b"[" * 100_000])
def test_what_is_no_json_object_is_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x").write_bytes(text)
    assert read_json(tmp_path / "x") is None


def test_no_file_is_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "missing") is None
    (tmp_path / "x").write_text("{}")
    assert read_json(tmp_path / "x" / "y") is None
