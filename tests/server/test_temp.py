"""The folder for a server's temporary files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_vllm.server import temp

NONCE = "0123456789abcdef"


@pytest.fixture(autouse=True)
def common(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, under a short path as sockets need one."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_it_is_private_and_vllm_is_told(common: Path) -> None:
    given = temp.make(NONCE, {"USER": "me", "RAY_TMPDIR": "/ray"})
    assert given == {
        "TMPDIR": f"{common}/vllm-{NONCE}",
        "TORCHINDUCTOR_CACHE_DIR": f"{common}/torchinductor_me",
    }
    assert temp.folder_of(NONCE).stat().st_mode & 0o777 == 0o700


def test_it_is_removed_with_what_is_in_it(common: Path) -> None:
    temp.make(NONCE, {})
    (temp.folder_of(NONCE) / "socket").write_text("")
    temp.remove(NONCE)
    temp.remove(NONCE)
    assert not list(common.iterdir())


def test_what_somebody_else_put_there_is_neither_used_nor_followed(common: Path) -> None:
    other = common / "other"
    other.mkdir()
    (other / "file").write_text("")
    temp.folder_of(NONCE).symlink_to(other)
    assert temp.make(NONCE, {}) == {}
    temp.remove(NONCE)
    assert (other / "file").exists()


def test_a_path_too_long_for_a_socket_is_not_used(
    common: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = common / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert temp.make(NONCE, {}) == {}
    assert not os.listdir(deep)
