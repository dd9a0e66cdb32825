"""A model from the hub, fetched once: however many tasks ask for it, one of them downloads.

What enters is a hub id and the environment that vLLM will have; what leaves is the folder of the
snapshot in the hub's cache, and progress on the way.

- The download runs in vLLM's interpreter (which has the hub's library) as a process of its own. It
  ends with whoever started it.
- One lock per model, revision and cache folder. Who waits for it sees the same progress.
- A token is passed by environment only, and no message holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from airflow_provider_vllm.exceptions import DownloadFailed
from airflow_provider_vllm.server import hub_fetch
from airflow_provider_vllm.server.checks.model import (
    READ_HERE,
    TRUE,
    is_hub_id,
    is_offline,
    look_up,
    read_weights,
)
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.private import open_private, private_dir
from airflow_provider_vllm.server.sizes import gib

_POLL_S = 0.2
_LAST_WORDS_S = 2.0
_ORPHANED_AFTER_S = 3600
_SAID_CHARACTERS = 500
_OTHER_NAME = (
    "Correct `model`: it is no folder on this worker (write one with its full path), and the hub's "
    "names are `organisation/name`."
)
_TOKEN = "set `hf_conn_id` to a connection whose password is a token that may read it."
# What the hub's library raises, and statuses of the hub: what that means, and what to do.
_PERMANENT: dict[object, tuple[str, str]] = {
    "GatedRepoError": (
        "its terms have to be accepted, or the token is not of an account that did",
        "Accept the terms on the model's page, and set `hf_conn_id` to a connection whose password "
        "is a token of that account.",
    ),
    "RepositoryNotFoundError": (
        "the hub has no model of this name, or does not show it without the right token",
        f"{_OTHER_NAME} For a private one {_TOKEN}",
    ),
    "HFValidationError": ("that is no name of a model", _OTHER_NAME),
    "RevisionNotFoundError": (
        "the hub does not have this revision of it",
        "Correct `revision` in engine_args.",
    ),
    "NoSpace": (
        "it does not fit on the disk",
        "Set `env={'HF_HOME': ...}` or `download_dir` to a larger disk, or make room.",
    ),
    "ModuleNotFoundError": (
        "the interpreter that has vLLM lacks the hub's library",
        "Install huggingface_hub there, or set `python` to another interpreter.",
    ),
    401: ("the hub refuses the token, or wants one", f"Correct the token, or {_TOKEN}"),
    403: ("the hub refuses to give it to this token", f"Correct the token, or {_TOKEN}"),
    404: ("the hub has no such thing", f"{_OTHER_NAME} See that HF_ENDPOINT is a hub."),
}
_TRANSIENT: dict[object, tuple[str, str]] = {
    429: (
        "the hub has been asked too often from here",
        "Try again later, or set `hf_conn_id`: the hub gives more to those that it knows.",
    ),
}
_ENDED_EARLY = (
    "the process that fetches it ended early",
    "See what it said; where it was killed, this worker may lack memory. Then try again.",
)
_UNREACHABLE = (
    "the hub did not answer as it should",
    "See that this worker reaches the hub (HF_ENDPOINT, HTTPS_PROXY), then try again.",
)


@dataclass(frozen=True)
class Progress:
    """How far a download is: bytes, `total` None until it is known, and seconds since it began.

    `waiting`: another task downloads, this one looks on.
    """

    model: str
    done: int
    total: int | None
    seconds: float
    waiting: bool = False

    def __str__(self) -> str:
        other = " by another task" if self.waiting else ""
        if self.total is None:
            return f"listing {self.model}{other}, {self.seconds:.0f} s"
        if not self.total:
            return f"{self.model} is in the cache"
        speed = f", {gib(self.done / self.seconds)}/s" if self.done and self.seconds else ""
        size = f"{gib(self.done)} of {gib(self.total)}"
        return f"downloading {self.model}{other}: {size}{speed}, {self.seconds:.0f} s"


def needs_download(model: str, engine_args: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether vLLM would ask the hub for `model` under `environ`, so that `download_once` is due."""
    options = Options.of(engine_args)
    elsewhere = environ.get("VLLM_USE_MODELSCOPE", "").upper() in TRUE or is_offline(environ)
    known_format = options.get("load_format", "auto") in READ_HERE
    return is_hub_id(model) and known_format and not elsewhere


def download_once(
    model: str,
    *,
    cache_dir: Path,
    lock_dir: Path,
    environ: Mapping[str, str],
    python: str,
    revision: str = "main",
    load_format: str = "auto",
    on_progress: Callable[[Progress], None] = lambda progress: None,
    every_s: float = 5.0,
    timeout_s: float | None = None,
) -> Path:
    """Fetches what `cache_dir` lacks of a hub model, or waits while another task does; the folder.

    `environ` is the child's whole environment, token included; `python` has vLLM. `on_progress`
    hears at once, every `every_s` seconds, and at the end of a download that moved bytes.

    Where the hub does not answer, or refuses, a model that is whole in the cache is good enough.
    Raises DownloadFailed: `transient` says whether trying again can help.
    """
    begun = time.monotonic()
    repository = cache_dir / f"models--{model.replace('/', '--')}"
    private_dir(lock_dir)
    name = hashlib.sha256(f"{cache_dir}\0{model}\0{revision}".encode()).hexdigest()[:16]
    fd = open_private(lock_dir / f"hub-{name}.lock", os.O_RDWR | os.O_CREAT)
    report = _Reporter(model, repository, fd, on_progress, every_s, begun)
    try:
        while not _try_lock(fd):
            report.now_and_then(waiting=True)
            _check_time(model, begun, timeout_s)
            time.sleep(_POLL_S)
        _remove_orphans(repository)
        os.ftruncate(fd, 0)
        order: dict[str, Any] = {"model": model, "revision": revision, "load_format": load_format}
        order |= {"cache_dir": str(cache_dir), "lock_fd": fd}
        with _started(python, order, environ) as (process, answer):
            while process.poll() is None:
                report.now_and_then(waiting=False)
                _check_time(model, begun, timeout_s)
                time.sleep(_POLL_S)
            report.at_the_end()
            try:
                return _result(model, process.returncode, answer, environ)
            except DownloadFailed:
                if folder := _whole_in_cache(model, revision, load_format, cache_dir):
                    return folder
                raise
    finally:
        os.close(fd)


class _Reporter:
    """Reads how far the download is, from the lock file and the cache, and says so."""

    def __init__(
        self,
        model: str,
        repository: Path,
        fd: int,
        on_progress: Callable[[Progress], None],
        every_s: float,
        begun: float,
    ) -> None:
        self._model, self._repository, self._fd = model, repository, fd
        self._on_progress, self._every_s, self._begun = on_progress, every_s, begun
        self._next = begun

    def now_and_then(self, *, waiting: bool) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            self._on_progress(self._progress(waiting))

    def at_the_end(self) -> None:
        progress = self._progress(waiting=False)
        if progress.done:
            self._on_progress(progress)

    def _progress(self, waiting: bool) -> Progress:
        seconds = time.monotonic() - self._begun
        try:
            note = json.loads(os.pread(self._fd, 4096, 0))
            done = hub_fetch.stored(self._repository) - note["start"]
            return Progress(self._model, max(0, done), note["missing"], seconds, waiting)
        except (ValueError, KeyError, TypeError):
            return Progress(self._model, 0, None, seconds, waiting)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


@contextlib.contextmanager
def _started(
    python: str, order: dict[str, Any], environ: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The downloading process and the file of its answer; it is gone when the block ends."""
    program = Path(hub_fetch.__file__).read_text(encoding="utf-8")
    with tempfile.TemporaryFile() as answer:
        process = subprocess.Popen(
            [python, "-c", program, json.dumps(order)],
            env={**environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            cwd="/",
            stdin=subprocess.PIPE,  # never written to: its end is the sign that we are gone
            stdout=answer,
            stderr=answer,
            pass_fds=(order["lock_fd"],),
        )
        try:
            yield process, answer
        finally:
            if process.stdin:
                process.stdin.close()
            try:
                process.wait(_LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _check_time(model: str, begun: float, timeout_s: float | None) -> None:
    if timeout_s is not None and time.monotonic() - begun > timeout_s:
        raise DownloadFailed(
            f"{model} was not downloaded within {timeout_s:g} s. Files that are complete are kept; "
            "try again, or raise `startup_timeout`.",
            transient=True,
        )


def _result(model: str, status: int, answer: IO[bytes], environ: Mapping[str, str]) -> Path:
    answer.seek(0)
    text = answer.read().decode(errors="replace").strip()
    try:
        found = json.loads(text.rpartition("\n")[2])
        if "folder" in found:
            return Path(found["folder"])
    except (ValueError, TypeError):
        lines = text.splitlines()
        found = {"error": f"exit status {status}", "text": "\n".join(lines[-2:]), "status": None}
    raise _failed(model, found, environ)


def _failed(model: str, found: Mapping[str, Any], environ: Mapping[str, str]) -> DownloadFailed:
    """The error for what the download said of its end: error, text and status."""
    keys = (found["error"], found["status"])
    permanent = next((_PERMANENT[key] for key in keys if key in _PERMANENT), None)
    otherwise = _ENDED_EARLY if str(found["error"]).startswith("exit status") else _UNREACHABLE
    why, step = permanent or _TRANSIENT.get(found["status"], otherwise)
    # The library's own advice comes after the first two lines, and is about its own arguments.
    text = str(found["text"]).partition("For more information")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()][:2]
    said = ": ".join([found["error"], " ".join(lines)] if lines else [found["error"]])
    said = _without_token(said, environ)[:_SAID_CHARACTERS].rstrip(". ")
    message = f"{model} could not be downloaded: {why} ({said}). {step}"
    return DownloadFailed(message, transient=permanent is None)


def _whole_in_cache(model: str, revision: str, load_format: str, cache_dir: Path) -> Path | None:
    options = Options({"revision": revision, "load_format": load_format, "download_dir": cache_dir})
    found, faults = look_up(model, options, {})
    if found is None or found.config is None or faults:
        return None
    found, faults = read_weights(found, options, offline=True, deadline=math.inf)
    return found.folder if (found.tensors or found.other_bytes) and not faults else None


def _without_token(text: str, environ: Mapping[str, str]) -> str:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environ.get(name):
            text = text.replace(environ[name], "***")
    return text


def _remove_orphans(repository: Path) -> None:
    """Removes what killed downloads left; a running one writes all the time."""
    for path in (repository / "blobs").glob(hub_fetch.ORPHANS):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ORPHANED_AFTER_S:
                path.unlink()
