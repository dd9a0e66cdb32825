"""The command `airflow vllm diagnose`, also `python -m airflow_provider_vllm.diagnosis`.

A log file (or stdin) goes in; the diagnosis as text or JSON comes out on stdout, and the verdict as
exit status: 0 healthy or stopped, 1 failed, interrupted or stalled, 3 unreadable, 4 unknown.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.output import print_all

UNREADABLE = 3
EXIT_STATUS = {
    "healthy": 0,
    "stopped": 0,
    "failed": 1,
    "interrupted": 1,
    "stalled": 1,
    "unknown": 4,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to a parser of any program."""
    parser.add_argument("log", nargs="?", default="-", help="the server's log; - reads stdin")
    parser.add_argument(
        "--exit-status",
        type=int,
        metavar="N",
        help="vLLM's own exit status: negative or above 128 for a signal",
    )
    parser.add_argument(
        "--evidence", metavar="FILE", help="evidence.json that was collected on the server's host"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON form")


def run(args: argparse.Namespace) -> int:
    """Diagnoses what the arguments name, prints it and returns the exit status."""
    try:
        evidence = _evidence(args.evidence)
    except (OSError, ValueError, RecursionError) as error:
        print(f"Cannot read the evidence {args.evidence}: {error}", file=sys.stderr)
        return UNREADABLE
    try:
        source = sys.stdin.buffer if args.log == "-" else args.log
        found = diagnose(source, exit_status=args.exit_status, evidence=evidence)
    except (OSError, ValueError) as error:
        print(f"Cannot read the log: {error}", file=sys.stderr)
        return UNREADABLE
    if args.json:
        print_all([json.dumps(found.to_json(), ensure_ascii=False, indent=2)])
    else:
        print_all([found.text(colour=sys.stdout.isatty())])
    return EXIT_STATUS[found.verdict]


def _evidence(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    with open(path, encoding="utf-8") as stream:
        value = json.load(stream)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value
