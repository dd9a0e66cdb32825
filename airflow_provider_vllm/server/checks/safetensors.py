"""The header of a safetensors file: its tensors, checked against the size of the file.

The format: 8 bytes little-endian length of the header, the header as JSON, then the tensors one
after the other to the end of the file (`data_offsets` count from the end of the header).
"""

from __future__ import annotations

import json
import math
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The format's own limit for a header (safetensors: MAX_HEADER_SIZE).
_MAX_HEADER = 100_000_000
# Above this a header is not looked into: it would take more time than the check has.
_READABLE_HEADER = 16_000_000
_GIT_LFS = b"version https://git-lfs"


class Damaged(ValueError):
    """A weight file that is not whole; the text says what is wrong with it, and its numbers."""


class TooLong(Exception):
    """A header that may be right and takes too long to read here."""


@dataclass(frozen=True)
class Tensor:
    """`dtype` as the format writes it (BF16, F32, I8, ...), `size` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file by name. Raises Damaged, and OSError where it cannot be read."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise Damaged("is no file")
    actual = found.st_size
    with path.open("rb") as file:
        start = file.read(8)
        if _GIT_LFS.startswith(start) and len(start) == 8:
            raise Damaged(f"is a Git LFS pointer of {actual} bytes, not the file itself")
        if len(start) < 8:
            raise Damaged(f"has {actual} bytes: it is empty or cut short")
        (length,) = struct.unpack("<Q", start)
        if length > min(_MAX_HEADER, actual - 8):
            raise Damaged(
                f"has {actual} bytes, but its header says that it is longer, or is no header"
            )
        if length > _READABLE_HEADER:
            raise TooLong(f"{path} has a header of {length} bytes, too long to look into.")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(entry) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as exc:
        raise Damaged(f"has a header that cannot be read ({exc})") from None
    expected = 8 + length + end
    if expected != actual:
        raise Damaged(f"has {actual} bytes, its header says {expected}")
    return tensors


def _tensor(entry: dict) -> Tensor:
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not isinstance(dtype, str) or not all(_is_size(each) for each in (begin, end, *shape)):
        raise TypeError(f"a tensor is {str(entry)[:200]}")
    return Tensor(dtype, shape, end - begin)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0
