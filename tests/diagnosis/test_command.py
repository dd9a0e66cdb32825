"""The command line: its texts, its JSON and its exit status, as a process of its own."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOGS = Path(__file__).parent / "logs"
COMMAND = (sys.executable, "-m", "airflow_provider_vllm.diagnosis")


def _run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, timeout=60)


def _log(tmp_path: Path, name: str) -> str:
    path = tmp_path / "vllm.log"
    path.write_bytes(gzip.decompress((LOGS / f"{name}.log.gz").read_bytes()))
    return str(path)


@pytest.mark.parametrize(
    ("name", "arguments", "status"),
    [
        ("00_baseline", (), 0),
        ("12_no_weights", (), 1),
        ("25_sigkill_server", ("--exit-status", "-9"), 1),
        ("25_sigkill_server", ("--exit-status", "137"), 1),
        ("25_sigkill_server", (), 0),
    ],
)
def test_exit_status(tmp_path: Path, name: str, arguments: tuple[str, ...], status: int) -> None:
    assert _run(_log(tmp_path, name), *arguments).returncode == status


def test_the_text_names_everything_and_has_no_colour(tmp_path: Path) -> None:
    done = _run(_log(tmp_path, "12_no_weights"))
    text = done.stdout.decode()
    assert "\x1b" not in text
    for part in (
        "Verdict: failed",
        "no_weights",
        "Root line: ",
        "Worker",
        "First action: ",
        "Retry: ",
    ):
        assert part in text
    assert "Only repeat it" in text
    assert "Cannot find any model weights" in text


def test_json_from_stdin(tmp_path: Path) -> None:
    log = Path(_log(tmp_path, "08b_kv_cache_smaller_than_max_len")).read_bytes()
    done = _run("--json", stdin=log)
    value = json.loads(done.stdout)
    assert done.returncode == 1
    assert value["cause"] == "max_model_len_exceeds_kv_cache"
    assert value["remedy"] == {"max_model_len": 128}
    assert value["retry"] == {"launch": False, "request": None}


def test_evidence_is_read_from_its_file(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence.json"
    evidence.write_text(json.dumps({"kernel_log": {"oom_kills": ["Killed process 3"], "xid": []}}))
    log = _log(tmp_path, "24_cgroup_oom_900M")
    done = _run(log, "--json", "--exit-status", "-9", "--evidence", str(evidence))
    assert json.loads(done.stdout)["cause"] == "host_oom_killed"


@pytest.mark.parametrize("arguments", [("/no/such/file",), ("/",), ("-", "--evidence", "/no/such")])
def test_unreadable(arguments: tuple[str, ...]) -> None:
    done = _run(*arguments)
    assert done.returncode == 3
    assert b"Cannot read" in done.stderr
    assert done.stdout == b""


def test_nothing_to_judge() -> None:
    assert _run(stdin=b"hello\n").returncode == 4


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_reader_that_has_gone_is_no_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ours, gone = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run(
            [*COMMAND, _log(tmp_path, "12_no_weights"), *arguments],
            stdout=gone,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(gone)
    assert (done.stderr, done.returncode) == (b"", 1)
