"""`airflow vllm …`: the servers of this host, ending one, and diagnosing a log."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.cli.cli_config import ActionCommand, Arg, GroupCommand, lazy_load_command

if TYPE_CHECKING:
    from airflow_provider_vllm.server.state import GenerationDir, ServerState

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

    found = [each for each in _states(args) if args.all or not each[1].settled]
    if args.json:
        for _, state in found:
            print(json.dumps(state.to_json(), default=list))
        return
    rows: list[tuple[str, ...]] = [("ID", "STATE", "MODEL", "GPUS", "AGE", "LEASE", "TASK")]
    rows += [_row(*each, time.time()) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    if not found:
        verb = "has run" if args.all else "runs"
        print(f"no server {verb} on this host (state root {_root(args).path})")


def stop(args: argparse.Namespace) -> None:
    """End the named servers, or all. Exit status 1 when one could not be ended, 2 for a wrong call."""
    from airflow_provider_vllm.exceptions import InvalidHandle, StopFailed
    from airflow_provider_vllm.server.stop import stop_server

    root = _root(args)
    known = list(dict.fromkeys(state.server_id for _, state in _states(args) if not state.settled))
    if bool(args.ids) == bool(args.all):
        print("name the servers to stop, or use --all", file=sys.stderr)
        sys.exit(2)
    failed = False
    for server_id in known if args.all else args.ids:
        try:
            if server_id not in known:
                print(f"{server_id}: does not run on this host", file=sys.stderr)
                failed = True
                continue
            done = [
                item
                for item in stop_server(root, server_id, "airflow vllm stop")
                if item.how != "already"
            ]
            print(f"{server_id}: ended after {sum(item.seconds for item in done):.1f} s")
        except (StopFailed, InvalidHandle) as exc:
            failed = True
            print(f"{server_id}: {exc}", file=sys.stderr)
    if args.all and not known:
        print("no server runs on this host")
    if failed:
        sys.exit(1)


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


def _root(args: argparse.Namespace) -> Any:
    from airflow_provider_vllm import worker
    from airflow_provider_vllm.exceptions import InsecurePath
    from airflow_provider_vllm.server.state import StateRoot

    path = args.state_root or worker.state_root_path()
    if not Path(path).is_dir():
        print(f"{path} does not exist: no server has run with this state root", file=sys.stderr)
        sys.exit(2)
    try:
        return StateRoot(path)
    except InsecurePath as exc:
        print(exc, file=sys.stderr)
        sys.exit(2)


def _states(args: argparse.Namespace) -> list[tuple[GenerationDir, ServerState]]:
    found = []
    for directory in _root(args).every_generation():
        if (state := directory.read()) is not None:
            found.append((directory, state))
    return found


def _row(directory: GenerationDir, state: ServerState, now: float) -> tuple[str, ...]:
    shown = state.state
    if state.on_this_host and not state.settled and not directory.supervised(state):
        shown = f"{state.state} (supervisor gone)"
    lease = "-" if state.settled or not state.lease_until else _span(state.lease_until - now)
    return (
        state.server_id,
        shown,
        state.model,
        ",".join(state.gpus) or "-",
        _span((state.ended_at or now) - state.started_at),
        lease,
        state.task or "-",
    )


def _span(seconds: float) -> str:
    if seconds < 0:
        return "over"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
