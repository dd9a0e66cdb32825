"""The journal: torn at any byte, written by several processes, on a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from airflow_provider_vllm.batch import journal as module
from airflow_provider_vllm.batch import results
from airflow_provider_vllm.batch.journal import Journal, Meta
from airflow_provider_vllm.batch.records import END, WINDOW, head
from airflow_provider_vllm.exceptions import BatchFailed


def line(row: int, size: int = 0) -> bytes:
    return json.dumps({"row": row, "text": "x" * size}).encode()


def add(journal: Journal, row: int, *, ok: bool = True, size: int = 0) -> None:
    start = head(b"%016x" % (row + 1), row, b"ok" if ok else b"rejected", 1, 2)
    journal.add(row, ok, start, line(row, size), END)


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open()
    rows = [*range(0, 50, 2), *range(49, 0, -2)]
    for row in rows:
        add(journal, row, ok=row % 7 > 0, size=row * 1000)
        journal.flush()
    good = [json.loads(text)["row"] for text in results.lines(journal, 50, ok=True)]
    bad = [json.loads(text)["row"] for text in results.lines(journal, 50, ok=False)]
    assert good == [row for row in range(50) if row % 7]
    assert bad == list(range(0, 50, 7))
    assert [record.outcome for record in results.records(journal, 3)] == ["rejected", "ok", "ok"]
    journal.close()


def test_records_longer_than_a_window(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open()
    for row, size in enumerate((10, WINDOW - 70, 3 * WINDOW, 5, 2 * WINDOW)):
        add(journal, row, size=size)
    journal.flush()
    for row, text in enumerate(results.lines(journal, 5, ok=True)):
        assert json.loads(text)["row"] == row
    journal.close()


def test_a_line_torn_at_any_byte_is_no_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open()
    for row in range(3):
        add(journal, row)
    journal.close()
    (segment,) = tmp_path.glob("rows-*.log")
    whole = segment.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(whole)):
        segment.write_bytes(whole[:cut])
        again = Journal(tmp_path)
        again.open()
        assert len(again.earlier().answers) == 2, cut
        add(again, 2)
        again.close()
        third = Journal(tmp_path)
        third.open()
        assert len(third.earlier().answers) == 3, cut
        third.close()
        for extra in sorted(tmp_path.glob("rows-*.log"))[1:]:
            extra.unlink()


def test_zeroed_blocks_are_no_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open()
    for row in range(3):
        add(journal, row, size=100)
    journal.close()
    (segment,) = tmp_path.glob("rows-*.log")
    data = bytearray(segment.read_bytes())
    data[200:260] = bytes(60)
    segment.write_bytes(data)
    again = Journal(tmp_path)
    again.open()
    assert len(again.earlier().answers) == 2
    again.close()


def test_failures_are_not_answers(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open()
    add(journal, 0, ok=False)
    add(journal, 1)
    journal.close()
    again = Journal(tmp_path)
    again.open()
    answered = again.earlier().answers
    assert answered.get(1) is None
    assert answered.get(2) is not None
    again.close()


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Journal(tmp_path)
    first.open()
    monkeypatch.setattr(module, "LOCK_WAIT", 0.2)
    with pytest.raises(BatchFailed, match=r"process \d+ still runs this batch"):
        Journal(tmp_path).open()
    first.write_meta(Meta("f", "i", None, owner="daily-ask-12ab", run="daily run-1"))
    with pytest.raises(BatchFailed, match=r"\d+ \(daily-ask-12ab of the run daily run-1\) still"):
        Journal(tmp_path).open()
    (tmp_path / "meta.json").write_text("no JSON")
    with pytest.raises(BatchFailed, match=r"process \d+ still runs this batch"):
        Journal(tmp_path).open()
    monkeypatch.setattr(module, "LOCK_WAIT", 30)
    threading.Timer(0.3, first.close).start()
    second = Journal(tmp_path)
    second.open()  # waits for the first one's end
    second.close()


def test_the_lock_does_not_outlive_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path;"
        "from airflow_provider_vllm.batch.journal import Journal;"
        "Journal(Path(sys.argv[1])).open(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False)
    journal = Journal(tmp_path)
    journal.open()
    journal.close()


def test_a_row_without_a_record_stops_the_results(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open()
    add(journal, 0)
    add(journal, 2)
    journal.flush()
    with pytest.raises(BatchFailed, match="row 2 has no record"):
        list(results.records(journal, 3))
    journal.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BatchFailed, match="cannot be written"):
        Journal(tmp_path / "file" / "journal").open()


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        journal = Journal(tmp_path / "new")
        journal.open()
        journal.write_meta(Meta("f", "d", None))
        journal.close()
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}


def test_a_try_that_only_waits_leaves_no_segment(tmp_path: Path) -> None:
    for _ in range(3):
        journal = Journal(tmp_path)
        journal.open()
        journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
