"""An object's path in, what its storage tells of its content out, without reading it.

Storages call it by many names: a checksum is taken before an ETag, and that before a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

# Lower case, without - and _: of s3fs, gcsfs, adlfs, the HTTP, SFTP, HDFS and memory file systems of fsspec.
MARKS = (
    ("md5hash", "contentmd5", "md5", "crc32c", "sha256", "contenthash", "checksum"),
    ("etag",),
    ("versionid", "generation"),
    ("mtime", "lastmodified", "modified", "modificationtime", "updated", "created"),
)


def version_of(path: Any) -> str:
    """Size and the best mark that there is, for comparing; the size alone where there is no other."""
    info = dict(_facts(_info(path)))
    for names in MARKS:
        if found := [f"{name}={info[name]}" for name in names if info.get(name)]:
            return f"size={info.get('size')} {' '.join(found)}"
    return f"size={info.get('size') or path.stat().st_size}"


def _info(path: Any) -> Mapping[str, Any]:
    """fsspec's own, asked anew: a listing that it keeps may be old."""
    fs = getattr(path, "fs", None)
    if fs is None:
        return {}
    with contextlib.suppress(Exception):
        fs.invalidate_cache(path.path)
    found = fs.info(path.path)
    return found if isinstance(found, Mapping) else {}


def _facts(info: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in info.items():
        if isinstance(value, Mapping):  # adlfs keeps the checksum in `content_settings`
            yield from _facts(value)
        elif not callable(value):
            plain = bytes(value).hex() if isinstance(value, (bytes, bytearray)) else value
            yield str(name).lower().replace("-", "").replace("_", ""), plain
