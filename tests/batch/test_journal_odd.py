"""A journal's folder in states that no batch leaves it in: the message names the path, and nothing good is lost."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from upath import UPath

from airflow_provider_vllm.batch import remote
from airflow_provider_vllm.batch.remote import PREFIX, RemoteJournal
from airflow_provider_vllm.exceptions import JournalFailed
from tests.batch.helpers import ForeignLink, run, start_child, until
from tests.batch.matrix import arguments, check, finish, journalled, spec_of
from tests.fakes.endpoint import ThreadedEndpoint

SEGMENT = "rows-00000000000000000000-00000000.log"


def answered(folder: Path, link: ForeignLink) -> Path:
    """A finished batch without its output; its journal's folder."""
    run(spec_of(folder), link, folder)
    (folder / "out.jsonl").unlink()
    return folder / "journal"


def directory(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.symlink_to(path)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")  # a regular file, and reading it is an error for root too


@pytest.mark.parametrize("make", [directory, dangling, loop, pipe, unreadable])
def test_a_segment_that_is_none(
    link: ForeignLink,
    server: ThreadedEndpoint,
    tmp_path: Path,
    quiet: dict[str, bytes],
    make: Callable[[Path], None],
) -> None:
    journal = answered(tmp_path, link)
    make(journal / SEGMENT)
    before = server.behaviour.requests
    with pytest.raises(JournalFailed, match=rf"{SEGMENT} .*away.*retry"):
        run(spec_of(tmp_path), link, tmp_path)
    (journal / SEGMENT).rmdir() if make is directory else (journal / SEGMENT).unlink()
    assert run(spec_of(tmp_path), link, tmp_path).manifest.reused > 500
    assert server.behaviour.requests == before + 1, "the refused row only"
    check(tmp_path, quiet)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[1]",
        "{}",
        '{"fingerprint": 1, "input": "x", "output_path": null}',
        '{"fingerprint": "f", "input": "x", "output_path": null, "inputs": [1]}',
        "\0\0\0",
        "no JSON",
    ],
)
def test_a_meta_file_of_another_shape(
    link: ForeignLink, tmp_path: Path, quiet: dict[str, bytes], text: str
) -> None:
    meta = answered(tmp_path, link) / "meta.json"
    meta.write_text(text)
    with pytest.raises(JournalFailed, match=r"meta.json was not written by a batch.*move it away"):
        run(spec_of(tmp_path), link, tmp_path)
    assert meta.read_text() == text
    meta.unlink()
    assert run(spec_of(tmp_path), link, tmp_path).manifest.reused > 500
    check(tmp_path, quiet)


def test_a_meta_file_of_a_later_version_is_understood(link: ForeignLink, tmp_path: Path) -> None:
    meta = answered(tmp_path, link) / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "colour": "green"}))
    assert run(spec_of(tmp_path), link, tmp_path).manifest.reused > 500


@pytest.mark.parametrize("make", [directory, loop])
def test_a_meta_file_that_cannot_be_read(
    link: ForeignLink, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    meta = answered(tmp_path, link) / "meta.json"
    meta.unlink()
    make(meta)
    with pytest.raises(JournalFailed, match=r"journal .* cannot be read"):
        run(spec_of(tmp_path), link, tmp_path)


def test_foreign_files_in_the_folder_stay(
    link: ForeignLink, tmp_path: Path, quiet: dict[str, bytes]
) -> None:
    journal = answered(tmp_path, link)
    odd = {
        "notes.txt": b"mine",
        "rows-backup.log": os.urandom(100_000),
        "rows-a.log": b"0123456789abcdef 0 ok 0 0 {}\n" + b"x y ok 0 0 {}\n" * 3,
        "rows-b.log": b"",
    }
    for name, data in odd.items():
        (journal / name).write_bytes(data)
    assert run(spec_of(tmp_path), link, tmp_path).manifest.reused > 500
    assert all((journal / name).read_bytes() == data for name, data in odd.items())
    check(tmp_path, quiet)


def test_a_file_in_the_place_of_the_folder(link: ForeignLink, tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("precious")
    with pytest.raises(JournalFailed, match=r"journal.* cannot be read: Not a directory"):
        run(spec_of(tmp_path), link, tmp_path)
    assert (tmp_path / "journal").read_text() == "precious"


def test_a_lock_that_is_a_directory(link: ForeignLink, tmp_path: Path) -> None:
    (tmp_path / "journal" / "lock").mkdir(parents=True)
    with pytest.raises(JournalFailed, match=r"Is a directory.*move .*/lock away"):
        run(spec_of(tmp_path), link, tmp_path)


def test_the_folder_is_removed_while_the_batch_runs(
    server: ThreadedEndpoint,
    link: ForeignLink,
    tmp_path: Path,
    quiet: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What this try is answered it still has: it says so, and ends as if nothing had been."""
    server.behaviour.latency = 0.01

    def remove(numbers: dict[str, Any]) -> None:
        shutil.rmtree(tmp_path / "journal", ignore_errors=True)

    with caplog.at_level(logging.WARNING):
        spec = spec_of(tmp_path, progress_interval=0.1, journal_sync=0.05)
        run(spec, link, tmp_path, on_progress=remove)
    assert "was removed while the batch runs" in caplog.text
    check(tmp_path, quiet)


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_earlier_answers_go_while_the_batch_runs(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path, quiet: dict[str, bytes], how: str
) -> None:
    server.behaviour.latency = 0.01
    process = start_child(tmp_path / "journal", server.base_url, arguments(tmp_path))
    until(lambda: journalled(tmp_path) >= 200)
    process.kill()
    finish(process)
    (first,) = (tmp_path / "journal").glob("rows-*.log")

    def lose(numbers: dict[str, Any]) -> None:
        first.unlink(missing_ok=True) if how == "removed" else first.write_bytes(b"")

    with pytest.raises(JournalFailed, match=r"rows-.* (any more|was changed).* retry"):
        run(spec_of(tmp_path, progress_interval=0.1), link, tmp_path, on_progress=lose)
    assert not (tmp_path / "out.jsonl").exists()
    run(spec_of(tmp_path), link, tmp_path)
    check(tmp_path, quiet)


# On object storage.

BUCKET = "memory://odd"


class Bucket:
    """Any path-like whose files cannot be read, as those of a storage without permission."""

    def __init__(self, path: Any, name: str) -> None:
        self._path, self._broken = path, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path, name)

    def __str__(self) -> str:
        return str(self._path)

    def __truediv__(self, name: str) -> Bucket:
        return Bucket(self._path / name, self._broken)

    def iterdir(self) -> Any:
        return [Bucket(path, self._broken) for path in self._path.iterdir()]

    def open(self, *mode: Any) -> Any:
        if self.name.endswith(self._broken):
            raise ValueError("403 Forbidden")  # not an OSError: storages have errors of their own
        return self._path.open(*mode)


def copies() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    fsspec.filesystem("memory").store.clear()
    return folder


def test_a_fetch_that_fails_leaves_no_copy(temporary: Path) -> None:
    (UPath(BUCKET) / f"{SEGMENT}.000000.part").write_text("x")
    (UPath(BUCKET) / "rows-x.log").write_text("left alone")
    (UPath(BUCKET) / "lock.000000.part").write_text("left alone")
    with pytest.raises(JournalFailed, match=r"memory:.* cannot be fetched: 403 Forbidden.*retry"):
        RemoteJournal(Bucket(UPath(BUCKET), ".part")).open()
    assert copies() == []
    with pytest.raises(JournalFailed, match=r"memory:.* cannot be read: 403 Forbidden"):
        RemoteJournal(Bucket(UPath(BUCKET), "meta.json")).read_meta()
    journal = RemoteJournal(UPath(BUCKET))
    journal.open()
    assert len(copies()) == 1
    journal.close()
    assert copies() == []


def test_no_room_for_the_copy(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "no-such-folder"))
    with pytest.raises(JournalFailed, match="No such file or directory"):
        RemoteJournal(UPath(BUCKET)).open()


def test_the_copy_of_a_killed_process_goes_with_the_next_one(temporary: Path) -> None:
    child = os.fork()
    if child == 0:
        RemoteJournal(UPath(BUCKET)).open()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    alive = RemoteJournal(UPath(BUCKET))
    alive.open()
    assert len(copies()) == 2, "one that is just made may be about to be locked"
    for copy in copies():
        long_ago = time.time() - 2 * remote.BEGUN
        os.utime(copy, (long_ago, long_ago))
    other = RemoteJournal(UPath(f"{BUCKET}/other"))
    other.open()
    assert sorted(copies()) == sorted([alive.folder, other.folder])
    alive.close()
    other.close()
    assert copies() == []


def test_the_last_answers_are_sent_with_patience(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put, fails = RemoteJournal._put, [True, True]

    def fail(self: RemoteJournal, name: str, data: bytes) -> None:
        if fails and fails.pop():
            raise ValueError("503 Slow down")
        put(self, name, data)

    monkeypatch.setattr(remote, "LAST_TRIES", (0.0, 0.01, 0.01))
    monkeypatch.setattr(RemoteJournal, "_put", fail)
    for patience in (2, 5):
        fails[:] = [True] * patience
        journal = RemoteJournal(UPath(BUCKET))
        journal.open()
        before = len(journal.earlier().answers)
        journal.add(0, True, b"%016x 0 ok 0 0 " % patience, b'{"a":1}', b"\n")
        journal.close()
        assert ("could not be sent" in caplog.text) is (patience == 5)
    assert before == 1
