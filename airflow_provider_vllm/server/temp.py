"""A folder of its own for the temporary files of one start, removed with what else is left of it.

vLLM binds its sockets and lays its rendezvous file under random names beside everybody else's in the
temporary folder, and a killed one leaves them there: nobody could tell later whose they were.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

# A socket's path holds 107 bytes (unix(7)), and vLLM's names are UUIDs.
LONGEST = 107 - len("/") - 36

log = logging.getLogger(__name__)


def folder_of(nonce: str) -> Path:
    return Path(tempfile.gettempdir()) / f"vllm-{nonce}"


def make(nonce: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Make the folder, of mode 0700; the variables by which a server with the environment `environ` uses it.

    Empty where it can't be made or its path is too long for sockets: vLLM then uses the common one. What
    servers share stays in the common one: PyTorch's compiled kernels, and the file by which Ray finds
    the cluster that already runs.
    """
    folder = folder_of(nonce)
    if len(os.fsencode(folder)) > LONGEST:
        log.warning("%s is too long for sockets: vLLM's temporary files go to its parent", folder)
        return {}
    try:
        folder.mkdir(mode=0o700)
    except OSError as exc:
        log.warning("no folder for vLLM's temporary files: %s", exc)
        return {}
    common = tempfile.gettempdir()
    user = environ.get("USER") or str(os.getuid())
    shared = {"TORCHINDUCTOR_CACHE_DIR": f"{common}/torchinductor_{user}", "RAY_TMPDIR": common}
    return {"TMPDIR": str(folder)} | {n: v for n, v in shared.items() if n not in environ}


def remove(nonce: str) -> None:
    """Remove the folder, where it is one of this user's. Never raises."""
    folder = folder_of(nonce)
    try:
        found = os.lstat(folder)
    except OSError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        shutil.rmtree(folder, ignore_errors=True)
