"""The cgroups around this process: a controller's name goes in, their folders come out, the innermost first.

Linux, cgroups of both versions. `root` stands for `/` and is another folder in tests only.
"""

from __future__ import annotations

from pathlib import Path


def folders(controller: str, root: Path = Path("/")) -> tuple[int, list[Path]]:
    """(version of cgroups, folders); no folder where there are no cgroups."""
    mount = root / "sys/fs/cgroup"
    path, version = "", 2
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return version, []
    for line in lines:
        _, controllers, found = line.split(":", 2)
        if controller in controllers.split(","):
            path, version, mount = found, 1, mount / controller
            break
        if not controllers:
            path = found
    # Inside a container the path may be the host's, and its own cgroup is the mount itself.
    innermost = mount / path.lstrip("/")
    if not innermost.is_dir():
        innermost = mount
    above = [folder for folder in innermost.parents if folder.is_relative_to(mount)]
    return version, [innermost, *above]


def read_number(path: Path) -> int | None:
    """The number in a file; None where there is none, or where it is no limit (`max`)."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
