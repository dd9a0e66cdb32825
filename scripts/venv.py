"""One virtual environment: made, filled by pip, and marked when it is complete.

Enters: a path and the packages wanted. Leaves: a directory with a stamp that says what was asked
for. Invariants: the stamp is there only while the environment is complete, so an environment
without one (an interrupted set-up) is made again from scratch; one whose stamp names other
packages is brought up to date; one whose stamp fits is left alone.

pip's full output goes to a log file; the note of the running stage shows where pip is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.progress import Note

TAIL_LINES = 15


class InstallFailed(Exception):
    """pip, or the check after it, failed; the message has the end of the log and its path."""


class Venv:
    """The environment at `path`; pip's output is kept in `logs`."""

    def __init__(self, path: Path, logs: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self._stamp = path / "complete.json"
        self._log = logs / f"set-up{path.name}.log"

    def holds(self, *asked: object) -> bool:
        """Whether it is complete for what is asked and its interpreter still runs."""
        return self._read_stamp() == {**self._identity(), "asked": _digest(asked)} and self._runs()

    @contextmanager
    def building(self, *asked: object) -> Iterator[None]:
        """Around the installs: makes the environment where needed, stamps it at the end."""
        stamp = self._read_stamp()
        same_place = {key: stamp.get(key) for key in self._identity()} == self._identity()
        fits = same_place and self._runs()
        if (
            not fits and self.path.is_symlink()
        ):  # what it leads to is another's, and would be emptied
            self.path.unlink()
        self._stamp.unlink(missing_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        if not fits:
            self._run([sys.executable, "-m", "venv", "--clear", str(self.path)], None)
        yield
        part = self._stamp.with_suffix(".part")
        part.write_text(json.dumps({**self._identity(), "asked": _digest(asked)}))
        part.rename(self._stamp)

    def install(self, packages: list[str], note: Note) -> None:
        """pip install. Raises InstallFailed."""
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "install"]
        self._run([*pip, "--progress-bar", "off", *packages], note)

    def uninstall(self, packages: list[str]) -> None:
        """pip uninstall; what is not there is no error."""
        self._run([str(self.python), "-m", "pip", "uninstall", "--yes", *packages], None)

    def check(self, code: str, note: Note) -> None:
        """Run Python code in it. Raises InstallFailed where that fails."""
        note.text = "checking that it imports"
        self._run([str(self.python), "-c", code], None)
        note.text = ""

    def _run(self, command: list[str], note: Note | None) -> None:
        pip_steps = PipSteps(self.path)
        with (
            self._log.open("a") as log,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                if note is not None:
                    note.text = pip_steps.after(line)
        if process.returncode != 0:
            lines = self._log.read_text().splitlines()[-TAIL_LINES:]
            raise InstallFailed(
                f"{' '.join(command[:6])} ... ended with status {process.returncode}. "
                f"The end of {self._log}:\n  " + "\n  ".join(lines)
            )

    def _identity(self) -> dict[str, str]:
        # A moved checkout or another Python has scripts and packages that no longer fit.
        return {"path": str(self.path), "python": sys.version}

    def _read_stamp(self) -> dict[str, str]:
        try:
            return json.loads(self._stamp.read_text())
        except (OSError, ValueError):
            return {}

    def _runs(self) -> bool:
        try:
            return subprocess.run([str(self.python), "-c", ""], check=False).returncode == 0
        except OSError:
            return False


class PipSteps:
    """Reads pip's lines one by one and says in a few words where pip is."""

    def __init__(self, venv: Path) -> None:
        self._venv = venv
        self._seen = 0
        self._text: str | Callable[[], str] = ""

    def after(self, line: str) -> str | Callable[[], str]:
        """The state after this line of pip's output, as `Note.text` takes it."""
        if line.startswith(("Collecting ", "Requirement already satisfied: ")):
            self._seen += 1
            self._text = f"resolving, {self._seen} packages so far"
        elif match := re.match(r"\s*(?:Downloading|Using cached) (\S+?)-\d\S* \((.+)\)", line):
            self._text = f"{self._seen} packages so far, fetching {match[1]} ({match[2]})"
        elif line.startswith("Installing collected packages: "):
            total, before = line.count(",") + 1, self._installed()
            self._text = lambda: f"unpacked {self._installed() - before} of {total} packages"
        elif line.startswith("Successfully installed"):
            self._text = ""
        return self._text

    def _installed(self) -> int:
        return len(list(self._venv.glob("lib/python3*/site-packages/*.dist-info")))


def _digest(asked: tuple[object, ...]) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
