"""Full disks and inputs that go away: no row is lost or doubled."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.run import check_inputs
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed
from tests.batch.helpers import (
    ForeignLink,
    run,
    start_child,
    until,
)
from tests.batch.matrix import (
    ROWS,
    arguments,
    check,
    finish,
    journalled,
    killed_at,
    spec_of,
)
from tests.batch.small_disk import SmallDisk
from tests.fakes.endpoint import ThreadedEndpoint


def test_disk_full_while_the_journal_is_written(
    server: ThreadedEndpoint, tmp_path: Path, quiet: dict[str, bytes]
) -> None:
    """A file may not grow beyond 100 kB, so a write stops in the middle of a record."""
    child = start_child(
        tmp_path / "journal", server.base_url, arguments(tmp_path), limit_bytes=100_001
    )
    status, out, err = finish(child)
    assert status == 3, err
    assert "cannot be written: File too large" in out
    (segment,) = (tmp_path / "journal").glob("rows-*.log")
    data = segment.read_bytes()
    assert len(data) == 100_001
    assert not data.endswith(b"\n"), "the last record is torn"
    result = run(spec_of(tmp_path), ForeignLink(server.base_url), tmp_path)
    assert result.manifest.reused == data.count(b" ok ") - (b" ok " in data[data.rindex(b"\n") :])
    check(tmp_path, quiet)


def test_disk_full_while_the_results_are_written(
    server: ThreadedEndpoint, tmp_path: Path, quiet: dict[str, bytes]
) -> None:
    """The journal has two segments, each under the limit; the results file would be above it."""
    size = len(quiet["results"])
    process = start_child(tmp_path / "journal", server.base_url, arguments(tmp_path))
    with killed_at(process):
        until(lambda: journalled(tmp_path) >= ROWS // 2)
    finish(process)
    asked = server.behaviour.prompts.total()
    status, out, err = finish(
        start_child(
            tmp_path / "journal", server.base_url, arguments(tmp_path), limit_bytes=size * 9 // 10
        )
    )
    assert status == 3, out + err
    assert "every answer is kept" in out
    assert not (tmp_path / "out.jsonl").exists()
    assert not list(tmp_path.glob(".*.part"))
    run(spec_of(tmp_path), ForeignLink(server.base_url), tmp_path)
    check(tmp_path, quiet)
    assert server.behaviour.prompts.total() - asked <= ROWS // 2 + 17 + 1


FEW = (0.05, 0.4, 0.6, 0.9)
MANY = tuple(number / 40 for number in range(1, 41) if number / 40 not in FEW)


@pytest.mark.parametrize(
    "share", [*FEW, *(pytest.param(share, marks=pytest.mark.full) for share in MANY)]
)
def test_a_disk_with_too_little_room(
    server: ThreadedEndpoint, tmp_path: Path, quiet: dict[str, bytes], share: float
) -> None:
    """A real one, with a part of the room that journal and results need: full in the first half of the sizes while
    the journal is written, in the second while the files are."""
    size = int(share * (2.1 * len(quiet["results"]) + 50_000))
    folder = tmp_path / "disk"
    spec = arguments(tmp_path, output_path=str(folder / "out.jsonl"))
    with SmallDisk(folder, size) as disk:

        def once() -> tuple[int, str, str]:
            journal = folder / "journal"
            return finish(start_child(journal, server.base_url, spec, prefix=disk.enter))

        status, out, err = once()
        assert status in (3, 0) if share > 0.9 else status == 3, err
        if status == 3:
            assert re.search(
                r"(journal|disk/out\.jsonl\S*) .*cannot be written: No space left", out
            ), out
            assert re.search(r"\(.*B free in \S+/disk\S*\)", out), out
            needed = re.search(r"about ([\d.]+) kB more are needed", out)
            if needed or share < 0.9:  # the manifest's size is not told
                assert needed, out
                written = sum(path.stat().st_size for path in disk.files.glob("journal/*.log"))
                rest = written if "disk/out" in out else len(quiet["results"]) - written
                assert float(needed[1]) * 1000 > 0.8 * rest
            assert "make room" in out
            assert not (disk.files / "out.jsonl").exists()
            assert not list(disk.files.glob(".*.part"))
        before = answered_in(disk.files)
        asked = server.behaviour.prompts.total()
        disk.grow(64 << 20)
        status, out, err = once()
        assert status == 0, err + out
        assert json.loads(out)["reused"] == before
        assert server.behaviour.prompts.total() - asked <= ROWS - 1 - before, "asked twice"
        for path in disk.files.glob("out.jsonl*"):
            if path.is_file():
                shutil.copy(path, tmp_path)
    check(tmp_path, quiet)


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl.gz"])
def test_no_room_for_results_of_any_form(
    server: ThreadedEndpoint, tmp_path: Path, form: str
) -> None:
    """The journal fits, the results only in part."""
    source, chance = tmp_path / "in.csv", random.Random(1)
    lines = (f"row {number} {chance.randbytes(300).hex()}\n" for number in range(300))
    source.write_text("prompt\n" + "".join(lines))
    folder = tmp_path / "disk"
    spec = arguments(tmp_path, input_path=str(source), output_path=str(tmp_path / f"out.{form}"))
    run(BatchSpec(**spec), ForeignLink(server.base_url), tmp_path)
    expected = (tmp_path / f"out.{form}").read_bytes()
    journal = sum(path.stat().st_size for path in (tmp_path / "journal").iterdir())
    spec["output_path"] = str(folder / f"out.{form}")
    with SmallDisk(folder, journal + len(expected) // 3 + 16_384) as disk:

        def once() -> tuple[int, str, str]:
            journal = folder / "journal"
            return finish(start_child(journal, server.base_url, spec, prefix=disk.enter))

        status, out, err = once()
        assert status == 3, err
        assert f"disk/out.{form} cannot be written: No space left on device" in out
        assert [path.name for path in disk.files.iterdir()] == ["journal"]
        disk.grow(64 << 20)
        status, out, err = once()
        assert status == 0, err
        assert json.loads(out)["reused"] == 300
        assert (disk.files / f"out.{form}").read_bytes() == expected


def answered_in(folder: Path) -> int:
    """Whole good records."""
    found = set()
    for path in (folder / "journal").glob("rows-*.log"):
        for line in path.read_bytes().splitlines(keepends=True):
            fields = line.split(b" ", 5)
            if len(fields) == 6 and fields[2] == b"ok" and line.endswith(b"}\n"):
                found.add(fields[0])
    return len(found)


def test_an_input_that_cannot_be_read_on(
    server: ThreadedEndpoint, link: ForeignLink, tmp_path: Path
) -> None:
    """A network file system that goes away in the middle; what is answered is kept."""

    class Flaky(type(tmp_path)):  # type: ignore[misc]
        def open(self, *args: Any, **kwargs: Any) -> Any:
            file = super().open(*args, **kwargs)
            return Breaking(file) if server.behaviour.prompts or broken else file

    class Breaking:
        def __init__(self, file: Any) -> None:
            self._file, self._lines = file, 0

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def readline(self, size: int) -> bytes:
            self._lines += 1
            if self._lines > 400:
                raise OSError("Stale file handle")
            data: bytes = self._file.readline(size)
            return data

    broken: list[bool] = []
    arguments(tmp_path)
    checked = check_inputs(spec_of(tmp_path), to_path=Flaky)
    broken.append(True)
    with pytest.raises(BatchFailed, match=r"cannot be read on.*Stale file handle.*are kept"):
        run(spec_of(tmp_path), link, tmp_path, checked=checked)
    broken.clear()
    assert run(spec_of(tmp_path), link, tmp_path).manifest.reused > 0
