"""Lines for the standard output of a command in; nothing out, also where its reader has gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def print_all(lines: Sequence[str]) -> None:
    """Print, to a reader that may have gone (`... | head -1`)."""
    try:
        print(*lines, sep="\n", flush=True, end="\n" if lines else "")
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
