"""A journal on object storage: parts of a local one, so that another host can go on.

Invariants: the concatenated parts of a segment are a prefix of it; a part is written once and never changed; an
upload that fails is tried again with the next one, and loses nothing on this host; the local copy goes when it is
closed, and that of a process that was killed with the next one that opens any.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.sources import ToPath, is_local
from airflow_provider_vllm.exceptions import JournalFailed

log = logging.getLogger(__name__)
PREFIX = "vllm-journal-"
PART = re.compile(r"(rows-[\w-]+\.log)\.(\d+)\.part")
PART_BYTES = 1 << 26  # at most; after an outage there is more to send
PATIENCE = 1.0  # seconds that `sync` waits for a storage
LAST_PATIENCE = 10.0  # and `close`
LAST_TRIES = (0.0, 0.5, 1.0)  # pauses before each, when the journal is closed
BEGUN = 60.0  # seconds; by then a process has long locked the folder that it made


class RemoteJournal(Journal):
    """Like Journal, with its folder at `remote` (a path-like); the work is done in a local one."""

    def __init__(self, remote: Any) -> None:
        super().__init__(Path(str(remote)))
        self._remote = remote
        self._sent = self._part = 0
        self._sending: threading.Thread | None = None
        self._segment = ""

    @property
    def name(self) -> str:
        return str(self._remote)

    def open(self, rows: int = 0) -> None:
        """Fetch what earlier tries on any host left, then start a segment."""
        remove_leftovers(Path(tempfile.gettempdir()))
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise self._failed(error) from error
        try:
            super().open(rows)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._segment = self._segments[-1].name

    def _fetch(self) -> None:
        try:
            parts = self._parts()
            for name, numbered in parts.items():
                self._join(self.folder / name, sorted(numbered, key=lambda part: part[0]))
        except Exception as error:  # object stores have errors of their own
            if isinstance(error, OSError) and str(error.filename).startswith(str(self.folder)):
                raise
            raise JournalFailed(
                f"the journal {self.name} cannot be fetched: {error}; its answers are kept there; retry, when the "
                "storage can be reached and its files can be read"
            ) from error
        if parts:
            log.info("Fetched %d journal segments from %s", len(parts), self._remote)

    def _parts(self) -> dict[str, list[tuple[int, Any]]]:
        """The parts of every segment by its name; what else lies there is left alone."""
        parts: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        if self._remote.exists():
            for path in self._remote.iterdir():
                if found := PART.fullmatch(path.name):
                    parts[found[1]].append((int(found[2]), path))
        return parts

    @staticmethod
    def _join(target: Path, numbered: list[tuple[int, Any]]) -> None:
        with target.open("wb") as file:
            for expected, (number, path) in enumerate(numbered):
                if number != expected:
                    break  # a gap: what follows has no beginning
                with path.open("rb") as source:
                    shutil.copyfileobj(source, file)

    def _read_meta(self) -> bytes:
        with (self._remote / "meta.json").open("rb") as file:
            return bytes(file.read())

    def _write_meta(self, data: bytes) -> None:
        try:
            self._put("meta.json", data)
        except OSError:
            raise
        except Exception as error:
            raise OSError(str(error)) from error

    def sync(self) -> None:
        """Send what is new as one more part.

        A storage that hangs is not waited for: whoever calls has the server to watch.
        """
        super().sync()
        if self._sending is None or not self._sending.is_alive():
            self._sending = threading.Thread(target=self._try_to_send, daemon=True)
            self._sending.start()
        self._sending.join(PATIENCE)

    def _try_to_send(self) -> None:
        try:
            self._send()
        except Exception as error:  # object stores have errors of their own
            log.warning("A journal part could not be sent, trying again later: %s", error)

    def _send(self) -> None:
        whole = True
        while whole and self._fd >= 0 and (data := os.pread(self._fd, PART_BYTES, self._sent)):
            self._put(f"{self._segment}.{self._part:06d}.part", data)
            self._sent += len(data)
            self._part += 1
            whole = len(data) == PART_BYTES  # else what came meanwhile is the next one's

    def _put(self, name: str, data: bytes) -> None:
        self._remote.mkdir(parents=True, exist_ok=True)
        with (self._remote / name).open("wb") as file:
            file.write(data)

    def close(self) -> None:
        """Send the rest, and remove the local folder."""
        if self._fd < 0:
            super().close()
            return
        with contextlib.suppress(JournalFailed):
            self.flush()
        self._send_last()
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send_last(self) -> None:
        problem: Exception = TimeoutError("an upload hangs")
        if self._sending is not None:
            self._sending.join(LAST_PATIENCE)
            if self._sending.is_alive():
                return self._give_up(problem)
        for pause in LAST_TRIES:
            time.sleep(pause)
            try:
                return self._send()
            except Exception as error:
                problem = error
        self._give_up(problem)

    def _give_up(self, problem: Exception) -> None:
        log.warning(
            "The last answers could not be sent to %s, so a retry asks for them again: %s",
            self._remote,
            problem,
        )


def remove_leftovers(parent: Path) -> None:
    """The local copies of processes that were killed: nobody holds their lock."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            info = folder.lstat()
            mine = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()
            if mine and time.time() - info.st_mtime > BEGUN and not _is_locked(folder):
                shutil.rmtree(folder)


def _is_locked(folder: Path) -> bool:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def journal_at(text: str, to_path: ToPath) -> Journal:
    """The journal in a local or remote folder."""
    path = to_path(text)
    return Journal(path) if is_local(path) else RemoteJournal(path)
