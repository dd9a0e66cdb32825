"""Object storage: a file system that knows no rename and no append, and shows an object when it is closed."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from upath import UPath

from airflow_provider_vllm.batch import remote
from airflow_provider_vllm.batch.remote import RemoteJournal, journal_at
from airflow_provider_vllm.batch.run import check_inputs, run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.version import version_of
from airflow_provider_vllm.exceptions import BatchFailed, InvalidPrompts
from tests.batch.helpers import LOG, ForeignLink, to_path, until
from tests.fakes.endpoint import ThreadedEndpoint

BUCKET = "memory://bucket"
pytestmark = pytest.mark.usefixtures("empty_bucket")


def put(name: str, rows: int = 40) -> str:
    text = "".join(json.dumps({"prompt": f"p{index}"}) + "\n" for index in range(rows))
    UPath(f"{BUCKET}/{name}").write_text(text)
    return f"{BUCKET}/{name}"


def spec(source: str, **more: Any) -> BatchSpec:
    return BatchSpec(input_path=source, output_path=f"{BUCKET}/out.jsonl", **more)


def run(one: BatchSpec, link: ForeignLink, journal: str = f"{BUCKET}/journal", **more: Any) -> Any:
    return run_batch(one, link, journal_dir=journal, log=LOG, to_path=to_path, **more)


def names() -> set[str]:
    return {name.rpartition("/bucket/")[2] for name in fsspec.filesystem("memory").store}


def write_journal(rows: int, *, sync: bool) -> None:
    """One of so many answers, sent after each or all at its end."""
    journal = RemoteJournal(UPath(f"{BUCKET}/journal"))
    journal.open()
    for row in range(rows):
        journal.add(row, True, b"%016x %d ok 0 0 " % (row + 1, row), b'{"a":1}', b"\n")
        journal.flush()
        if sync:
            journal.sync()
    journal.close()


def read_journal() -> int:
    """How many answers another host finds."""
    journal = RemoteJournal(UPath(f"{BUCKET}/journal"))
    journal.open()
    found = len(journal.earlier().answers)
    journal.close()
    return found


def test_everything_on_object_storage(link: ForeignLink) -> None:
    put("a.jsonl", 30)
    put("b.jsonl", 20)
    one = spec(f"{BUCKET}/*.jsonl")
    result = run(one, link)
    assert result.manifest.rows == 50
    rows = UPath(f"{BUCKET}/out.jsonl").read_text().splitlines()
    assert [json.loads(row)["custom_id"] for row in rows] == [f"row-{i}" for i in range(1, 51)]
    assert {"out.jsonl", "out.jsonl.manifest.json"} <= names()
    assert not any(name.endswith("errors.jsonl") for name in names())


def test_another_host_goes_on(server: ThreadedEndpoint, link: ForeignLink) -> None:
    """The first host is gone without a word: only what it had sent to the bucket is left."""
    server.behaviour.latency = 0.02
    source = put("in.jsonl", 200)
    one = spec(source, concurrency=4, journal_sync=0.1, pack=1, progress_interval=0.05)

    class Gone(Exception):
        pass

    def die(numbers: dict[str, Any]) -> None:
        if numbers["done"] >= 80:
            raise Gone

    with pytest.raises(Gone):
        run(one, link, on_progress=die)
    parts = [name for name in names() if name.endswith(".part")]
    assert len(parts) > 2
    before = server.behaviour.prompts.total()
    result = run(one, link)
    assert result.manifest.reused >= 76
    assert result.manifest.outcomes == {"ok": 200}
    assert server.behaviour.prompts.total() - before <= 200 - 76


def test_a_gap_in_the_parts_hides_what_follows(link: ForeignLink) -> None:
    write_journal(4, sync=True)
    parts = sorted(name for name in names() if name.endswith(".part"))
    assert len(parts) == 4
    UPath(f"{BUCKET}/{parts[2]}").unlink()
    assert read_journal() == 2


def test_a_storage_that_fails_for_a_while_loses_nothing(
    link: ForeignLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_away, failures = RemoteJournal._put, iter([True, False, True, True])

    def fail_sometimes(self: RemoteJournal, name: str, data: bytes) -> None:
        if name.endswith(".part") and next(failures, False):
            raise OSError("the bucket is not there")
        put_away(self, name, data)

    monkeypatch.setattr(RemoteJournal, "_put", fail_sometimes)
    run(spec(put("in.jsonl"), journal_sync=0.05), link)
    assert run(spec(put("in.jsonl")), link).manifest.reused == 40


def test_what_an_outage_held_back_is_sent_in_parts_that_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 100)
    write_journal(10, sync=False)
    parts = [path for path in UPath(f"{BUCKET}/journal").iterdir() if path.name.endswith(".part")]
    sizes = [path.stat().st_size for path in parts]
    assert len(sizes) > 3 and max(sizes) == 100
    assert read_journal() == 10


def test_local_files_with_a_remote_journal_and_a_kill(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """`file://` stands for a storage that both hosts see, so that a real process can be killed."""
    import subprocess
    import sys

    server.behaviour.latency = 0.02
    source = tmp_path / "in.txt"
    source.write_text("".join(f"p{index}\n" for index in range(200)))
    code = f"""
import logging, sys
from upath import UPath
from airflow_provider_vllm.batch import remote, sources
sources.is_local = remote.is_local = lambda path: not str(path).startswith("{tmp_path}/bucket")
from airflow_provider_vllm.batch.run import run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from tests.batch.helpers import ForeignLink
spec = BatchSpec(input_path="{source}", output_path="{tmp_path}/out.jsonl", concurrency=4,
                 journal_sync=0.1, pack=1)
run_batch(spec, ForeignLink("{server.base_url}"), journal_dir="{tmp_path}/bucket",
          log=logging.getLogger())
"""
    root = Path(__file__).parents[2]
    copies = {
        **os.environ,
        "TMPDIR": str(tmp_path),
    }  # of a process that is killed: they stay a while
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, env=copies)
    until(lambda: server.behaviour.prompts.total() >= 120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    parts = list((tmp_path / "bucket").glob("*.part"))
    assert parts
    one = BatchSpec(input_path=str(source), output_path=str(tmp_path / "out.jsonl"))
    journal = UPath(f"{BUCKET}/journal")
    for part in parts:
        journal.mkdir(parents=True, exist_ok=True)
        (journal / part.name).write_bytes(part.read_bytes())
    result = run(one, link)
    assert result.manifest.reused >= 60
    assert result.manifest.outcomes == {"ok": 200}


def test_wrong_remote_inputs_are_found_before_the_start() -> None:
    with pytest.raises(InvalidPrompts, match="does not exist"):
        check_inputs(spec(f"{BUCKET}/no.jsonl"), to_path=to_path)
    UPath(f"{BUCKET}/empty.jsonl").write_text("")
    with pytest.raises(InvalidPrompts, match="is empty"):
        check_inputs(spec(f"{BUCKET}/empty.jsonl"), to_path=to_path)
    source = put("in.jsonl")
    UPath(f"{BUCKET}/out.jsonl").write_text("precious")
    with pytest.raises(InvalidPrompts, match="no manifest"):
        check_inputs(spec(source), to_path=to_path)


def test_a_journal_that_is_only_looked_at_leaves_nothing(tmp_path: Path) -> None:
    import tempfile

    before = set(Path(tempfile.gettempdir()).glob("vllm-journal-*"))
    assert journal_at(f"{BUCKET}/journal", to_path).read_meta() is None
    assert set(Path(tempfile.gettempdir()).glob("vllm-journal-*")) == before


class Object:
    """A path-like whose file system tells this of it."""

    def __init__(self, **info: Any) -> None:
        self.path, self.fs = "bucket/in.jsonl", self
        self._info = info

    def info(self, path: str) -> dict[str, Any]:
        return self._info

    def invalidate_cache(self, path: str) -> None:
        raise NotImplementedError

    def stat(self) -> Any:
        return os.stat_result((0,) * 6 + (7,) + (0,) * 3)


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (
            {"ETag": '"a"', "LastModified": 1},
            {"ETag": '"a"', "LastModified": 2},
            {"ETag": '"b"', "LastModified": 1},
        ),
        (
            {"md5Hash": "x", "etag": "1"},
            {"md5Hash": "x", "etag": "2"},
            {"md5Hash": "y", "etag": "1"},
        ),
        (
            {"content_settings": {"content_md5": bytearray(b"1")}, "etag": "1"},
            {"content_settings": {"content_md5": bytearray(b"1")}, "etag": "2"},
            {"content_settings": {"content_md5": bytearray(b"2")}, "etag": "1"},
        ),
        ({"mtime": 1.5}, {"mtime": 1.5, "uid": 3}, {"mtime": 2.5}),
        ({"size": 5}, {"size": 5}, {"size": 6}),
        ({}, {}, {"size": 6}),
    ],
    ids=["s3", "gcs", "azure", "sftp", "size", "nothing"],
)
def test_what_a_storage_tells_of_an_object(
    one: dict[str, Any], same: dict[str, Any], other: dict[str, Any]
) -> None:
    assert version_of(Object(**one)) == version_of(Object(**same))
    assert version_of(Object(**one)) != version_of(Object(**other))


def test_a_remote_input_of_the_same_size_that_changed_is_noticed(
    server: ThreadedEndpoint, link: ForeignLink, caplog: pytest.LogCaptureFixture
) -> None:
    source = put("in.jsonl", 9)
    run(spec(source), link)
    assert run(spec(source, on_changed_input="fail"), link).manifest.reused == 9
    text = UPath(source).read_text()
    UPath(source).write_text(text.replace("p3", "q3"))
    with pytest.raises(BatchFailed, match="the input changed since an earlier try"):
        run(spec(source, on_changed_input="fail"), link)
    with caplog.at_level("WARNING"):
        result = run(spec(source), link)
    assert (result.manifest.reused, result.manifest.changed) == (8, 1)
    assert "1 changed and run again (the input changed)" in caplog.text


def test_a_storage_that_hangs_holds_up_neither_rows_nor_progress(
    server: ThreadedEndpoint, link: ForeignLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.behaviour.latency = 0.1
    source = put("in.jsonl")
    send, free, hung = RemoteJournal._put, threading.Event(), threading.Event()

    def hang(self: RemoteJournal, name: str, data: bytes) -> None:
        if name.endswith(".part") and not hung.is_set():
            hung.set()
            assert free.wait(30)
        send(self, name, data)

    def see(numbers: dict[str, Any]) -> None:
        if hung.is_set() and numbers["done"] >= 30:
            free.set()

    monkeypatch.setattr(RemoteJournal, "_put", hang)
    monkeypatch.setattr(remote, "PATIENCE", 0.05)
    given = {"concurrency": 2, "pack": 1, "journal_sync": 0.1, "progress_interval": 0.1}
    result = run(spec(source, **given), link, on_progress=see)
    assert free.is_set(), "progress went on while the upload hung"
    assert result.manifest.outcomes == {"ok": 40}
    assert run(spec(source), link).manifest.reused == 40, "what hung came after all"


def test_a_storage_that_hangs_for_good(
    link: ForeignLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The results do not wait for the journal, which says what it lacks."""
    free = threading.Event()

    def hang(self: RemoteJournal, name: str, data: bytes) -> None:
        if name.endswith(".part"):
            free.wait(30)

    monkeypatch.setattr(RemoteJournal, "_put", hang)
    monkeypatch.setattr(remote, "PATIENCE", 0.05)
    monkeypatch.setattr(remote, "LAST_PATIENCE", 0.2)
    try:
        run(spec(put("in.jsonl")), link)
    finally:
        free.set()
    assert "out.jsonl" in names()
    assert "could not be sent" in caplog.text
