"""What is printed beside a failed test: each server that it may have used, and how that server fared."""

from __future__ import annotations

from pathlib import Path

from airflow_provider_vllm.server.state import ENDED_STATES, GenerationDir

LINES = 20  # of each log, from its end


def of_servers(folder: Path, since: float) -> str:
    """State and last lines of the logs of the servers below `folder` that live, or ended `since` (epoch)."""
    found = []
    for file in sorted(folder.rglob("servers/*/*/state.json")):
        try:
            state = GenerationDir(file.parent).read()
        except OSError as error:  # of a test that made it a folder, for one
            found.append(f"{file.parent}: {error}")
            continue
        if state and (state.state not in ENDED_STATES or file.stat().st_mtime >= since):
            found.append(
                f"{file.parent}: {state.state}, reason {state.reason}, exit status"
                f" {state.exit_status}, settled {state.settled}: {state.message}"
            )
            for log in ("vllm.log", "supervisor.log"):
                found += [f"  {log}: {line}" for line in last_lines(file.parent / log)]
    return "\n".join(found)


def last_lines(file: Path) -> list[str]:
    """The end of a log; none where there is no such file."""
    try:
        return file.read_text(errors="replace").splitlines()[-LINES:]
    except FileNotFoundError:
        return []
