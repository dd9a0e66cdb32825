"""A real file system of a few kilobytes, for tests of full disks: a tmpfs in a mount namespace of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

# As root, or as a user who may have a namespace of his own.
WAYS = (
    (["unshare", "--mount"], ["--mount"]),
    (
        ["unshare", "--user", "--map-root-user", "--mount"],
        ["--user", "--preserve-credentials", "--mount"],
    ),
)
MOUNT = 'mount -t tmpfs -o size="$2" tmpfs "$1" && echo mounted && exec cat'


class SmallDisk:
    """`with SmallDisk(folder, 65536) as disk`: seen by what is run with the prefix `disk.enter` only.

    Skips the test where this machine lets nobody mount anything.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self._size = folder, size
        folder.mkdir()

    def __enter__(self) -> SmallDisk:
        problems = []
        for start, enter in WAYS:
            command = [*start, "sh", "-c", MOUNT, "sh", str(self.folder), str(self._size)]
            self._holder = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert self._holder.stdout is not None
            if self._holder.stdout.readline() == "mounted\n":
                self.enter = ["nsenter", f"--target={self._holder.pid}", *enter, "--"]
                return self
            problems.append(self._holder.communicate()[1].strip())
        pytest.skip(f"a full disk was not tested: no tmpfs can be mounted here: {problems}")

    def __exit__(self, *_: object) -> None:
        self._holder.communicate()  # ends with its input, and the mount with it

    def grow(self, size: int) -> None:
        command = ["mount", "-o", f"remount,size={size}", str(self.folder)]
        subprocess.run([*self.enter, *command], check=True)

    @property
    def files(self) -> Path:
        """The folder as it can be read from outside."""
        return Path(f"/proc/{self._holder.pid}/root{self.folder}")
