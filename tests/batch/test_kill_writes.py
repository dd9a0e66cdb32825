"""The task is killed before each of its writes, one after the other: every retry ends with the same bytes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.batch.helpers import batch_row, start_child, write_rows
from tests.batch.matrix import finish, outputs
from tests.fakes.endpoint import Behaviour, ThreadedEndpoint

SHARDS = 36
SHORT = {"concurrency": 4, "pack": 1, "journal_sync": 0.01, "max_error_rate": 1}


def short(folder: Path) -> dict[str, Any]:
    """Forty rows, each of which takes a moment, so that many writes lie between."""
    made: list[Any] = [batch_row(f"id-{index}", f"[[slow 0.01]] {index}") for index in range(40)]
    made[7] = batch_row("id-7", "[[status 400]] no")
    made[20] = b"{broken\n"
    source = write_rows(folder / "in.jsonl", made)
    return {**SHORT, "input_path": str(source), "output_path": str(folder / "out.jsonl")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, bytes]]:
    """How many writes the short batch does, and its files."""
    folder = tmp_path_factory.mktemp("short")
    with ThreadedEndpoint(Behaviour()) as server:
        child = start_child(folder / "journal", server.base_url, short(folder), die_at=-1)
        status, out, err = finish(child)
    assert status == 0, err
    return json.loads(out)["writes"], outputs(folder)


@pytest.mark.parametrize(
    "shard", [0, *(pytest.param(shard, marks=pytest.mark.full) for shard in range(1, SHARDS))]
)
def test_a_kill_between_any_two_writes(
    server: ThreadedEndpoint,
    tmp_path: Path,
    undisturbed: tuple[int, dict[str, bytes]],
    shard: int,
) -> None:
    """All shards together kill the task before each of its writes; a retry ends it, with equal bytes."""
    writes, expected = undisturbed
    assert writes > 100
    for moment in range(writes - shard, 0, -SHARDS):
        folder = tmp_path / str(moment)
        folder.mkdir()
        child = start_child(folder / "journal", server.base_url, short(folder), die_at=moment)
        assert finish(child)[0] in (-signal.SIGKILL, 0), "a quicker run may have fewer writes"
        before = server.behaviour.prompts.total()
        status, out, err = finish(start_child(folder / "journal", server.base_url, short(folder)))
        assert status == 0, err
        manifest = json.loads(out)
        assert manifest["outcomes"] == {"invalid_input": 1, "ok": 38, "rejected": 1}
        assert server.behaviour.prompts.total() - before == 39 - manifest["reused"]
        assert outputs(folder) == expected
        left = [path.name for path in folder.rglob("*") if path.name.endswith(".part")]
        assert left == [], moment
