"""`airflow vllm …`: the servers of this host, ending one, and diagnosing a log."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from airflow.cli.cli_config import ActionCommand, Arg, GroupCommand, lazy_load_command

from airflow_provider_vllm.output import print_all

if TYPE_CHECKING:
    from airflow_provider_vllm.server.state import GenerationDir, ServerState, StateRoot

    Starts = list[tuple[GenerationDir, ServerState | None]]

ME = "airflow_provider_vllm.cli"
STATE_ROOT = Arg(("--state-root",), help="state root of the worker; default: [vllm] state_root")


def get_vllm_cli_commands() -> list[GroupCommand]:
    """The command group; Airflow finds it through provider metadata."""
    return [
        GroupCommand(
            name="vllm",
            help="vLLM servers of this host",
            subcommands=(
                ActionCommand(
                    name="servers",
                    help="List the servers of this host",
                    func=lazy_load_command(f"{ME}.servers"),
                    args=(
                        STATE_ROOT,
                        Arg(("--all",), help="those that have ended too", action="store_true"),
                        Arg(("--json",), help="as JSON lines", action="store_true"),
                    ),
                ),
                ActionCommand(
                    name="stop",
                    help="End servers of this host",
                    func=lazy_load_command(f"{ME}.stop"),
                    args=(
                        STATE_ROOT,
                        Arg(
                            ("ids",),
                            help="ids as `airflow vllm servers` shows them",
                            nargs="*",
                            metavar="ID",
                        ),
                        Arg(("--all",), help="every server of this host", action="store_true"),
                    ),
                ),
                ActionCommand(
                    name="diagnose",
                    help="Say why vLLM failed, from its log",
                    func=lazy_load_command(f"{ME}.diagnose"),
                    args=_diagnose_args(),
                ),
            ),
        )
    ]


def servers(args: argparse.Namespace) -> None:
    """List servers with state, model, GPUs, age, lease and owner task."""
    import json

    root = _root(args)
    found = [each for each in _states(root) if args.all or each[1] is None or not each[1].settled]
    if args.json:
        shown = (_unreadable(each) if state is None else state.to_json() for each, state in found)
        print_all([json.dumps(each, default=list) for each in shown])
        return
    rows: list[tuple[str, ...]] = [("ID", "STATE", "MODEL", "GPUS", "AGE", "LEASE", "TASK")]
    rows += [_row(*each, time.time()) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if not found:
        lines.append(_none(root, "has run" if args.all else "runs"))
    print_all(lines)


def stop(args: argparse.Namespace) -> None:
    """End the named servers, or all. Exit status 1 when one could not be ended, 2 for a wrong call."""
    if bool(args.ids) == bool(args.all):
        print("name the servers to stop, or use --all", file=sys.stderr)
        sys.exit(2)
    root = _root(args)
    found: dict[str, Starts] = {}
    for directory, state in _states(root):
        found.setdefault(directory.server_dir.name, []).append((directory, state))
    open_ids = [
        name
        for name, starts in found.items()
        if any(state is None or not state.settled for _, state in starts)
    ]
    if args.all and not open_ids:
        print(_none(root, "runs"))
    ended = [
        _stop_one(root, name, found.get(name, []), name in open_ids)
        for name in (open_ids if args.all else dict.fromkeys(args.ids))
    ]
    if not all(ended):
        sys.exit(1)


def _stop_one(root: StateRoot | None, name: str, starts: Starts, runs: bool) -> bool:
    """End one server and say so; whether that went well."""
    from airflow_provider_vllm.exceptions import VllmError
    from airflow_provider_vllm.server.stop import stop_server

    if root is None or not runs:
        told = "has ended already" if starts else "is no server of this host"
        print(f"{name}: {told}; `airflow vllm servers --all` lists them", file=sys.stderr)
        return False
    for directory, state in starts:
        if state is None:
            print(
                f"{name}: {directory.state_file} cannot be read, so that its processes are not known. "
                f"End those that `ps` shows, then remove {directory.path}.",
                file=sys.stderr,
            )
            return False
    try:
        done = [
            item for item in stop_server(root, name, "airflow vllm stop") if item.how != "already"
        ]
    except (VllmError, OSError) as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return False
    if any(item.how == "unknown" for item in done):
        hosts = ", ".join(sorted({state.host for _, state in starts if state}))
        print(f"{name}: it was started on {hosts}, before a boot or in a container that has gone")
    else:
        print(f"{name}: ended after {sum(item.seconds for item in done):.1f} s")
    return True


def diagnose(args: argparse.Namespace) -> None:
    from airflow_provider_vllm.diagnosis.command import run

    sys.exit(run(args))


def _diagnose_args() -> Sequence[Arg]:
    return (
        Arg(("log",), help="vLLM's log; - or nothing: standard input", nargs="?", default="-"),
        Arg(
            ("--exit-status",),
            help="exit status of vLLM (negative: a signal)",
            type=int,
            metavar="N",
        ),
        Arg(("--evidence",), help="evidence.json of the server's directory", metavar="FILE"),
        Arg(("--json",), help="the diagnosis as JSON", action="store_true"),
    )


def _root(args: argparse.Namespace) -> StateRoot | None:
    """The state root; None where no server has run with the configured one. Looks on, makes nothing."""
    from airflow_provider_vllm import worker
    from airflow_provider_vllm.exceptions import VllmError
    from airflow_provider_vllm.server.state import StateRoot

    given = args.state_root
    try:
        path = Path(worker.state_root_path() if given is None else given).expanduser()
        if (path / "servers").is_dir() and given != "":
            return StateRoot(path)
        if given is None and not path.exists():
            return None
        fault = (
            "is not there" if not path.exists() else "is no state root: it has no folder `servers`"
        )
    except VllmError as exc:
        print(exc, file=sys.stderr)
        sys.exit(2)
    except OSError as exc:
        fault = f"cannot be read: {exc.strerror or exc}"
    named = str(path) if given is None else given
    print(
        f"state root {named!r} {fault}. Give the one of `[vllm] state_root` in the worker's airflow.cfg.",
        file=sys.stderr,
    )
    sys.exit(2)


def _none(root: StateRoot | None, verb: str) -> str:
    from airflow_provider_vllm import worker

    path = worker.state_root_path() if root is None else root.path
    return f"no server {verb} on this host (state root {path})"


def _states(root: StateRoot | None) -> Starts:
    """The starts of all servers, oldest first; None for a state that cannot be read."""
    found = []
    for directory in root.every_generation() if root else ():
        try:
            state = directory.read()
        except OSError:
            state = None
        if state is not None or directory.state_file.exists():  # else it has just begun
            found.append((directory, state))
    return found


def _unreadable(directory: GenerationDir) -> dict[str, str]:
    name, file = directory.server_dir.name, str(directory.state_file)
    return {"server_id": name, "state": "unreadable", "state_file": file}


def _row(directory: GenerationDir, state: ServerState | None, now: float) -> tuple[str, ...]:
    name = directory.server_dir.name
    if state is None:
        return (name, "unreadable", *["-"] * 4, str(directory.state_file))
    shown = state.state
    if state.on_this_host and not state.settled and not directory.supervised(state):
        shown = f"{state.state} (supervisor gone)"
    lease = "-" if state.settled or not state.lease_until else _span(state.lease_until - now)
    cells = (
        name,
        shown,
        state.model,
        ",".join(state.gpus) or "-",
        _span((state.ended_at or now) - state.started_at),
        lease,
        state.task or "-",
    )
    # A run id is anybody's text, and a terminal obeys what is not printable.
    return tuple("".join(c if c.isprintable() else "?" for c in cell) for cell in cells)


def _span(seconds: float) -> str:
    if seconds < 0:
        return "over"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
