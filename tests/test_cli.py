"""`airflow vllm …` as a person on the worker calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.server.state import GenerationDir, ServerState, StateRoot, pid_namespace
from tests import airflow_unit  # noqa: F401 - before Airflow is imported
from tests.server.conftest import Servers, fake_spec, servers

__all__ = ["servers"]


def airflow(home: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "airflow", *arguments],
        env={**os.environ, "AIRFLOW_HOME": str(home), "NO_COLOR": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_servers_are_listed_and_stopped(servers: Servers, tmp_path: Path) -> None:
    servers.start(fake_spec(), "one", task="some_dag.some_task run try 1")
    root = ("--state-root", str(servers.root.path))

    listed = airflow(tmp_path, "vllm", "servers", *root)
    assert listed.returncode == 0
    (row,) = [line for line in listed.stdout.splitlines() if line.startswith("one ")]
    assert "ready" in row
    assert "tiny" in row
    assert "some_dag.some_task run try 1" in row

    refused = airflow(tmp_path, "vllm", "stop", *root)
    assert refused.returncode == 2
    stopped = airflow(tmp_path, "vllm", "stop", "one", *root)
    assert (stopped.returncode, "one: ended" in stopped.stdout) == (0, True)
    assert servers.tree("one") == []

    (state,) = [
        json.loads(line)
        for line in airflow(
            tmp_path, "vllm", "servers", "--all", "--json", *root
        ).stdout.splitlines()
        if line.startswith("{")
    ]
    assert (state["server_id"], state["state"]) == ("one", "stopped")
    again = airflow(tmp_path, "vllm", "stop", "--all", *root)
    assert (again.returncode, "no server" in again.stdout) == (0, True)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_is_diagnosed_from_stdin(tmp_path: Path, as_json: bool) -> None:
    log = (
        "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510] EngineCore failed to start.\n"
        "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510] Traceback (most recent call last):\n"
        '(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510]   File "a.py", line 1, in load_model\n'
        "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1510] torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free.\n"
    )
    options = ["--json"] if as_json else []
    done = airflow(tmp_path, "vllm", "diagnose", *options, stdin=log)
    assert done.returncode == 1
    if as_json:
        found = json.loads(done.stdout[done.stdout.index("{") :])
        assert found["group"] == "capacity"
        assert "CUDA out of memory" in found["root_line"]
    else:
        assert "CUDA out of memory" in done.stdout
        assert "First action" in done.stdout


def test_a_log_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    done = airflow(tmp_path, "vllm", "diagnose", str(tmp_path / "none.log"))
    assert done.returncode == 3
    assert "none.log" in done.stderr


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "airflow", "vllm", "servers"]
    with subprocess.Popen(
        command,
        env={**os.environ, "AIRFLOW_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert "BrokenPipeError" not in said


# -- the same in this process: odd arguments and odd state roots ---------------------------------

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """`airflow vllm ...`; exit status, stdout and stderr."""
    from airflow.cli import cli_parser

    def run(*arguments: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            args = cli_parser.get_parser().parse_args(["vllm", *arguments])
            args.func(args)
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def root(tmp_path: Path) -> StateRoot:
    return StateRoot(tmp_path / "root")


def state_of(root: StateRoot, name: str, **changes: Any) -> dict[str, Any]:
    state = ServerState(name, 1, "0123456789abcdef", "some-host", "another namespace", model="m")
    return state.but(**changes).to_json()


def written(root: StateRoot, name: str, state: Any) -> GenerationDir:
    directory = root.new_generation(name)
    text = state if isinstance(state, str) else json.dumps(state)
    directory.state_file.write_text(text)
    return directory


def test_no_server_has_run_with_the_configured_root(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__VLLM__STATE_ROOT", str(tmp_path / "none"))
    for arguments in (("servers",), ("stop", "--all")):
        code, said, _ = call(*arguments)
        assert (code, f"(state root {tmp_path / 'none'})" in said) == (0, True)
    code, _, said = call("stop", "one")
    assert (code, "one: is no server of this host" in said) == (1, True)
    assert not (tmp_path / "none").exists(), "looking makes nothing"


def test_a_root_that_is_none(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir(mode=0o700)
    for named, fault in {
        "/no/such": "is not there",
        str(tmp_path / "file"): "is no state root",
        str(tmp_path / "empty"): "is no state root: it has no folder `servers`",
        "": "is no state root",
        "x" * 5000: "cannot be read: File name too long",
        "a\0b": "is not there",
    }.items():
        for verb in (("servers",), ("stop", "one")):
            code, out, said = call(*verb, "--state-root", named)
            assert (code, out) == (2, "")
            assert f"state root {named!r} {fault}" in said
            assert "[vllm] state_root" in said
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_configured_root_that_is_relative(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__VLLM__STATE_ROOT", "vllm")
    code, _, said = call("servers")
    assert (code, "give an absolute path" in said) == (2, True)


def test_a_root_that_others_could_have_prepared(call: Call, root: StateRoot) -> None:
    root.path.chmod(0o755)
    code, _, said = call("servers", "--state-root", str(root.path))
    assert (code, "can be used by others" in said) == (2, True)


@pytest.mark.parametrize(
    "state",
    [
        "", "{", "[1]", "{}", "[" * 100_000,
        {"model": None}, {"started_at": "x"}, {"started_at": None}, {"lease_until": "x"}, {"gpus": [1]},
        {"tree": 7}, {"task": 5}, {"state": None}, {"settled": 1},
    ],
    ids=lambda state: str(state)[:20],
)  # fmt: skip
def test_a_damaged_state_hides_no_other_server(call: Call, root: StateRoot, state: Any) -> None:
    if isinstance(state, dict):
        state = {**state_of(root, "odd"), **state}
    directory = written(root, "odd", state)
    written(root, "well", state_of(root, "well", task="d.t"))
    where = ("--state-root", str(root.path))

    code, said, _ = call("servers", *where)
    rows = {line.split()[0]: line for line in said.splitlines()[1:]}
    assert (code, set(rows)) == (0, {"odd", "well"})
    assert "unreadable" in rows["odd"]
    assert str(directory.state_file) in rows["odd"]

    code, said, _ = call("servers", "--json", *where)
    states = {each["server_id"]: each["state"] for each in map(json.loads, said.splitlines())}
    assert (code, states) == (0, {"odd": "unreadable", "well": "launching"})

    code, said, wrong = call("stop", "--all", *where)
    assert code == 1
    assert "well: " in said
    assert f"odd: {directory.state_file} cannot be read" in wrong
    assert f"remove {directory.path}" in wrong


def test_a_state_that_is_a_folder(call: Call, root: StateRoot) -> None:
    root.new_generation("odd").state_file.mkdir()
    code, said, _ = call("servers", "--state-root", str(root.path))
    assert (code, "unreadable" in said) == (0, True)


def test_a_terminal_gets_nothing_to_obey(call: Call, root: StateRoot) -> None:
    written(root, "one", state_of(root, "../x", task="d.t \x1b[31m\n run"))
    _, said, _ = call("servers", "--state-root", str(root.path))
    assert "d.t ?[31m? run" in said
    assert "../x" not in said, "the id is the folder's name, which `stop` takes"


def test_wrong_names_to_stop(call: Call, root: StateRoot) -> None:
    here = {"pid_namespace": pid_namespace(), "settled": True, "state": "stopped"}
    written(root, "old", {**state_of(root, "old"), **here})
    where = ("--state-root", str(root.path))
    assert call("stop", *where)[0] == 2
    assert call("stop", "old", "--all", *where)[0] == 2
    code, out, said = call("stop", "old", "../../etc", "", "none", *where)
    assert (code, out) == (1, "")
    assert "old: has ended already" in said
    for name in ("../../etc", "", "none"):
        assert f"{name}: is no server of this host; `airflow vllm servers --all`" in said


def test_a_server_of_another_boot_is_not_called_ended(call: Call, root: StateRoot) -> None:
    written(root, "one", state_of(root, "one"))
    code, said, _ = call("stop", "one", "--state-root", str(root.path))
    assert (code, said) == (
        0, "one: it was started on some-host, before a boot or in a container that has gone\n",
    )  # fmt: skip


@pytest.mark.parametrize("content", [None, "", "[]", "[" * 100_000])
def test_evidence_that_cannot_be_read_is_named(
    call: Call, tmp_path: Path, content: str | None
) -> None:
    evidence = tmp_path / "evidence.json"
    if content is not None:
        evidence.write_text(content)
    code, _, said = call("diagnose", "--evidence", str(evidence), "/dev/null")
    assert code == 3
    assert said.startswith(f"Cannot read the evidence {evidence}: ")
