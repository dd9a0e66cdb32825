"""A journal on object storage: parts of a local one, so that another host can go on.

Invariants: the concatenated parts of a segment are a prefix of it; a part is written once and never changed; an
upload that fails is tried again with the next one, and loses nothing on this host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from airflow_provider_vllm.batch.journal import Journal, Meta
from airflow_provider_vllm.batch.sources import ToPath, is_local

log = logging.getLogger(__name__)


class RemoteJournal(Journal):
    """Like Journal, with its folder at `remote` (a path-like); the work is done in a local one."""

    def __init__(self, remote: Any) -> None:
        super().__init__(Path(str(remote)))
        self._remote = remote
        self._sent = self._part = 0
        self._segment = ""

    @property
    def name(self) -> str:
        return str(self._remote)

    def open(self, rows: int = 0) -> None:
        """Fetch what earlier tries on any host left, then start a segment."""
        self.folder = Path(tempfile.mkdtemp(prefix="vllm-journal-"))
        before = self._fetch()
        super().open(rows)
        self._segment = self._segments[-1].name
        if before:
            log.info("Fetched %d journal segments from %s", before, self._remote)

    def _fetch(self) -> int:
        parts: defaultdict[str, list[Any]] = defaultdict(list)
        if not self._remote.exists():
            return 0
        for path in self._remote.iterdir():
            name, _, number = path.name.removesuffix(".part").rpartition(".")
            if path.name.endswith(".part") and number.isdigit():
                parts[name].append((int(number), path))
        for name, numbered in parts.items():
            with (self.folder / name).open("wb") as file:
                for expected, (number, path) in enumerate(sorted(numbered, key=lambda p: p[0])):
                    if number != expected:
                        break  # a gap: what follows has no beginning
                    with path.open("rb") as source:
                        shutil.copyfileobj(source, file)
        return len(parts)

    def read_meta(self) -> Meta | None:
        try:
            with (self._remote / "meta.json").open("rb") as file:
                return Meta(**json.loads(file.read()))
        except (OSError, ValueError, TypeError):
            return None

    def write_meta(self, meta: Meta) -> None:
        try:
            self._put("meta.json", json.dumps(asdict(meta), indent=1).encode())
        except OSError as error:
            raise self._failed(error) from error

    def sync(self) -> None:
        """Send what is new as one more part."""
        super().sync()
        try:
            self._send()
        except Exception as error:  # object stores have errors of their own
            log.warning("A journal part could not be sent, trying again later: %s", error)

    def _send(self) -> None:
        path = self.folder / self._segment
        with path.open("rb") as file:
            file.seek(self._sent)
            data = file.read()
        if data:
            self._put(f"{self._segment}.{self._part:06d}.part", data)
            self._sent += len(data)
            self._part += 1

    def _put(self, name: str, data: bytes) -> None:
        self._remote.mkdir(parents=True, exist_ok=True)
        with (self._remote / name).open("wb") as file:
            file.write(data)

    def close(self) -> None:
        """Send the rest, and remove the local folder."""
        started = self._fd >= 0
        super().close()
        if started:
            with contextlib.suppress(Exception):
                self._send()
            shutil.rmtree(self.folder, ignore_errors=True)


def journal_at(text: str, to_path: ToPath) -> Journal:
    """The journal in a local or remote folder."""
    path = to_path(text)
    return Journal(path) if is_local(path) else RemoteJournal(path)
