"""The supervisor's book: memory is the truth, the file follows."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from airflow_provider_vllm.server import state
from airflow_provider_vllm.server.record import Record
from airflow_provider_vllm.server.state import ServerState, StateRoot


@pytest.fixture
def record(tmp_path: Path) -> Record:
    directory = StateRoot(tmp_path / "vllm").new_generation("s")
    return Record(directory, ServerState("s", 1, "0" * 16, "h", "ns"))


def written(record: Record) -> ServerState:
    found = record.dir.read()
    assert found
    return found


def test_memory_and_file_are_the_same(record: Record) -> None:
    assert record.write_first(control_url="http://h:1")
    assert written(record) == record.state
    record.write(state=state.LOADING, stage="import")
    assert written(record) == record.state
    assert record.state.stage_since > 0


def test_only_a_change_of_stage_moves_its_beginning(record: Record) -> None:
    record.write(stage="import")
    first = record.state.stage_since
    record.write(stage="import", progress="10%")
    assert record.state.stage_since == first
    record.write(stage="compile")
    assert record.state.stage_since > first


def test_nothing_new_is_not_written(record: Record) -> None:
    record.write(stage="import")
    before = os.stat(record.dir.state_file).st_ino
    record.write(stage="import")
    assert os.stat(record.dir.state_file).st_ino == before


def test_a_start_that_was_called_off_is_told_so(record: Record) -> None:
    record.dir.write_first(record.state.but(state=state.STOPPED, settled=True))
    assert not record.write_first(control_url="http://h:1")
    assert written(record).state == state.STOPPED


def test_a_disk_that_is_full_is_said_once_and_caught_up_with(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    record.write(state=state.LOADING)
    record.dir.state_file.unlink()
    record.dir.state_file.mkdir()
    with caplog.at_level(logging.ERROR):
        record.write(state=state.READY)
        record.write(lease_until=5.0)
    # Other loggers' levels depend on what was imported before: only errors count.
    assert len([each for each in caplog.records if each.levelno >= logging.ERROR]) == 1
    assert record.state.state == state.READY
    record.dir.state_file.rmdir()
    record.write(state=state.READY)  # nothing new, but the file is behind
    assert written(record) == record.state
    assert written(record).lease_until == 5.0


def test_a_directory_that_is_gone(record: Record) -> None:
    assert not record.directory_is_gone
    shutil.rmtree(record.dir.path)
    assert record.directory_is_gone
    record.write(state=state.READY)
    assert record.state.state == state.READY
