"""The outcomes of the chaos test as a table, and as the page docs/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.chaos.harness import LEASE_S, ROWS, Outcome

HEAD = (
    "fault, target, moment (DAG)",
    "run",
    "tries",
    "hit server gone (s)",
    "all gone (s)",
    "lost",
    "doubled",
    "locks",
    "segments",
    "temporary",
    "whole (s)",
)


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table, a row for each outcome."""
    lines = [HEAD, tuple("---" for _ in HEAD), *(_row(each) for each in outcomes)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write_page(path: Path, outcomes: Sequence[Outcome], *, cells: int) -> None:
    """Write docs/reliability.md; `cells` is how many there are, run or not."""
    introduction = _INTRODUCTION.format(rows=ROWS, lease=LEASE_S, run=len(outcomes), cells=cells)
    path.write_text(introduction + table(outcomes) + "\n")


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.cell,
        outcome.state,
        str(outcome.tries),
        f"{outcome.gone:.1f}",
        f"{outcome.all_gone:.1f}",
        str(outcome.lost),
        str(outcome.doubled),
        str(outcome.locks),
        str(outcome.segments),
        str(outcome.temporary),
        f"{outcome.seconds:.0f}",
    )


_INTRODUCTION = """# Reliability

What `make chaos` printed last: a real Airflow (LocalExecutor) runs a batch of {rows} rows on a real vLLM server,
and one process is hit at one moment. {run} of {cells} cells were run. Written by that command; not edited by hand.

- *hit server gone*: seconds from the fault until no process of the server that was hit was left. A server that
  survives the fault lives until the batch is over.
- *all gone*: seconds from the end of the run until no process of any server was left. The lease is {lease:g} s.
- *lost*, *doubled*: rows of the input that are missing in the results, or stand there twice.
- *locks*, *segments*, *temporary*: locks still held, shared memory segments left in /dev/shm, and folders of
  temporary files that are left.
- A frozen process of Airflow's own (task, its supervisor, the scheduler) is woken after 20 s; a scheduler that was
  killed is started again, as a service manager would.

"""
