"""The state root: what is refused, and how starts are numbered and found."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.exceptions import InsecurePath, InvalidHandle
from airflow_provider_vllm.server import state
from airflow_provider_vllm.server.locks import file_lock
from airflow_provider_vllm.server.processes import ProcessId, this_process
from airflow_provider_vllm.server.state import (
    GenerationDir,
    ServerState,
    StateRoot,
    check_server_id,
    pid_namespace,
)


@pytest.fixture
def root(tmp_path: Path) -> StateRoot:
    return StateRoot(tmp_path / "vllm")


def a_state(**fields: Any) -> ServerState:
    given: dict[str, Any] = {"host": "h", "pid_namespace": pid_namespace(), **fields}
    return ServerState("s", 1, "0" * 16, **given)


def test_it_is_made_private(root: StateRoot) -> None:
    for folder in (root.path, root.servers, root.locks, root.new_generation("s").path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_one_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm").chmod(mode)
    with pytest.raises(InsecurePath, match="can be used by others"):
        StateRoot(tmp_path / "vllm")


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InsecurePath, match="belongs to user"):
        StateRoot(tmp_path / "vllm")


@pytest.mark.parametrize("name", [".", "servers", "locks", "servers/s"])
def test_a_symlink_in_it_is_refused(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    link = (tmp_path / "vllm") if name == "." else (tmp_path / "vllm" / name)
    for folder in reversed(link.relative_to(tmp_path).parents[:-1]):
        (tmp_path / folder).mkdir(mode=0o700)
    link.symlink_to(elsewhere)
    with pytest.raises(InsecurePath, match="is a symlink"):
        StateRoot(tmp_path / "vllm").new_generation("s")
    assert list(elsewhere.iterdir()) == []


def test_starts_behind_a_symlink_are_not_seen(root: StateRoot, tmp_path: Path) -> None:
    real = root.new_generation("real")
    (root.servers / "link").symlink_to(root.servers / "real")
    (root.server_dir("real") / f"0002-{'a' * 16}").symlink_to(real.path)
    assert root.generations("link") == []
    assert root.generations("real") == [real]
    assert root.every_generation() == [real]


def test_starts_are_numbered_and_have_nonces_of_their_own(root: StateRoot) -> None:
    made = [root.new_generation("s") for _ in range(3)]
    (root.server_dir("s") / "9999-short").mkdir()
    (root.server_dir("s") / f"x-{'a' * 16}").mkdir()
    (root.server_dir("s") / f"9999-{'a' * 16}").touch()
    assert root.generations("s") == made
    assert root.newest("s") == made[-1]
    assert len({directory.path.name.partition("-")[2] for directory in made}) == 3
    assert root.generations("nothing") == []
    assert root.newest("nothing") is None
    assert made[0].root == root.path


def test_the_ten_thousandth_start_is_the_newest(root: StateRoot) -> None:
    for number in ("0002", "10000", "9999"):
        (root.server_dir("s") / f"{number}-{'a' * 16}").mkdir(parents=True, mode=0o700)
    root.server_dir("s").chmod(0o700)
    newest = root.newest("s")
    assert newest
    assert newest.path.name.startswith("10000-")


@pytest.mark.parametrize("server_id", ["a", "a-b_c.d", "0" * 120, "dag-task-0123456789abcdef"])
def test_ids_that_are_right(server_id: str) -> None:
    assert check_server_id(server_id) == server_id


@pytest.mark.parametrize("server_id", ["a..b", "a\n", "../a", "/a", "", "A", "ä", "0" * 121])
def test_ids_that_are_wrong(root: StateRoot, server_id: str) -> None:
    with pytest.raises(InvalidHandle):
        root.server_dir(server_id)
    with pytest.raises(InvalidHandle), root.server_lock(server_id):
        pass


def test_a_state_goes_through_json() -> None:
    full = a_state(
        supervisor=ProcessId(1, 2),
        tree=(ProcessId(3, 4), ProcessId(5, 6)),
        segments=("psm_a",),
        gpus=("GPU-a",),
        diagnosis={"cause": "x"},
        exit_status=-9,
    )
    assert ServerState.from_json(json.loads(json.dumps(full.to_json()))) == full


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"server_id": "s"}', '{"unknown": 1}'])
def test_a_state_that_cannot_be_read_is_none(root: StateRoot, text: str) -> None:
    directory = root.new_generation("s")
    directory.state_file.write_text(text)
    assert directory.read() is None


def test_a_field_of_a_later_version_is_ignored(root: StateRoot) -> None:
    directory = root.new_generation("s")
    directory.state_file.write_text(json.dumps({**a_state().to_json(), "of_later": 1}))
    assert directory.read() == a_state()


def test_the_first_state_is_written_once(root: StateRoot) -> None:
    directory = root.new_generation("s")
    assert directory.write_first(a_state(state=state.STOPPED))
    assert not directory.write_first(a_state())
    found = directory.read()
    assert found
    assert found.state == state.STOPPED


def test_whether_a_supervisor_lives_is_seen_by_process_or_by_lock(root: StateRoot) -> None:
    directory: GenerationDir = root.new_generation("s")
    here = a_state(supervisor=this_process())
    assert directory.supervised(here)
    assert not directory.supervised(here.but(supervisor=ProcessId(this_process().pid, 1)))
    # In another container its pid says nothing, and may be anybody's here.
    there = here.but(pid_namespace="another")
    assert not directory.supervised(there)
    with file_lock(directory.alive_file):
        assert directory.supervised(there)
    assert not directory.supervised(there)
