"""A C compiler: the machine's own, else the one that PyPI's `ziglang` brings.

The tests compile a stub of the NVIDIA driver, the batch benchmark its mock server.
"""

from __future__ import annotations

import shutil
import sys

FROM_PYPI = "ziglang"


def own_compiler() -> str | None:
    """The machine's own compiler, or None."""
    return next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None)


def c_compiler() -> list[str]:
    """The first words of a command line that compiles C."""
    own = own_compiler()
    return [own] if own else [sys.executable, "-m", FROM_PYPI, "cc"]
