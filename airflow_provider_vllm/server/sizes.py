"""Bytes for people."""

from __future__ import annotations

GIB = 1024**3


def gib(size: float) -> str:
    """`14.96 GiB`, and MiB below a tenth of one."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 10 else f"{size / 1024**2:.1f} MiB"
