"""Every error of this package.

    VllmError
    ├── InvalidInput (ValueError)        nothing was started: a field, file or argument is wrong
    │   ├── InvalidSpec                  a ServerSpec field
    │   ├── InvalidHandle                a server handle that is not one of ours
    │   └── InvalidPrompts               prompts, an input file, an output path
    ├── ServerError
    │   ├── StartFailed                  vLLM did not become ready; carries the diagnosis
    │   ├── ServerLost                   a server that was ready is gone or frozen
    │   ├── ServerUnreachable            the supervisor's control endpoint does not answer
    │   ├── StopFailed                   processes are left after a stop
    │   ├── PreflightFailed              what would fail before the weights are loaded
    │   ├── NoFreeGpu                    not enough free GPUs right now
    │   ├── DownloadFailed               a model could not be fetched; `transient` as below
    │   └── InsecurePath                 a folder or file that others could have prepared or read
    ├── BatchError
    │   ├── BatchFailed                  the engine failed for good, or one of
    │   │   ├── TooManyErrors            more rows failed than the batch allows
    │   │   │   └── UnsendableRows       (InvalidInput too) they cannot be sent: no server was asked
    │   │   └── JournalFailed            what was answered cannot be written down or read again
    │   └── RequestFailed                one request; `transient` says whether to send it again
    └── TaskInterrupted                  the task was killed: marked, cleared, or its worker shut down

Messages say what happened, where the evidence is, and what to do next, in that order.
"""

from __future__ import annotations


class VllmError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidInput(VllmError, ValueError):
    """An argument, a field or a file is wrong; nothing was started."""


class InvalidSpec(InvalidInput):
    """A field of a ServerSpec is wrong."""


class InvalidHandle(InvalidInput):
    """A value that should be a server handle is not one."""


class InvalidPrompts(InvalidInput):
    """Prompts, an input file or an output path cannot be used."""


class ServerError(VllmError):
    """A vLLM server could not be started, reached or stopped."""


class StartFailed(ServerError):
    """vLLM did not become ready.

    `exit_status` is vLLM's own (None while it still runs), `stage` the last stage of the start
    that its log showed, `log_path` the file on the worker, `diagnosis` the JSON form of the
    Diagnosis (None where none could be made), `report` its full text.
    """

    def __init__(
        self,
        message: str,
        *,
        exit_status: int | None = None,
        stage: str | None = None,
        log_path: str | None = None,
        diagnosis: dict | None = None,
        report: str | None = None,
    ) -> None:
        super().__init__(message)
        self.report = report
        self.exit_status = exit_status
        self.stage = stage
        self.log_path = log_path
        self.diagnosis = diagnosis


class ServerLost(ServerError):
    """A server that was ready is gone or frozen; `diagnosis` and `report` as in StartFailed."""

    def __init__(
        self, message: str, *, diagnosis: dict | None = None, report: str | None = None
    ) -> None:
        super().__init__(message)
        self.report = report
        self.diagnosis = diagnosis


class ServerUnreachable(ServerError):
    """The supervisor's control endpoint does not answer, or refuses the token."""


class StopFailed(ServerError):
    """Processes of a server are left after a stop; the message names them by pid."""


class PreflightFailed(ServerError):
    """Something that would fail later was found before the weights were loaded; `diagnosis` as in
    StartFailed. There is no `report`: the message says it all."""

    report: str | None = None

    def __init__(self, message: str, *, diagnosis: dict | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class NoFreeGpu(ServerError):
    """Not enough free GPUs on this host right now."""


class DownloadFailed(ServerError):
    """A model could not be fetched from the hub; `transient` says whether trying again can help."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class InsecurePath(ServerError):
    """A folder or file of ours is a symlink, another user's, or open to others; it is refused."""


class BatchError(VllmError):
    """A batch did not end well; the answered rows are kept."""


class BatchFailed(BatchError):
    """Too many rows failed, or the engine failed for good; `manifest` holds the counts.

    `errors` are the error rows of a list of prompts, of which no file is written.
    """

    def __init__(
        self, message: str, *, manifest: dict | None = None, errors: list | None = None
    ) -> None:
        super().__init__(message)
        self.manifest = manifest
        self.errors = errors


class TooManyErrors(BatchFailed):
    """More rows failed than `max_error_rate` or `max_errors` allows."""

    @property
    def is_lasting(self) -> bool:
        """Whether the next try will meet the same: every failed row was wrong in itself, or refused as wrong."""
        outcomes = (self.manifest or {}).get("outcomes", {})
        failed = {name for name, count in outcomes.items() if count} - {"ok"}
        return bool(failed) and failed <= {"invalid_input", "rejected"}


class UnsendableRows(TooManyErrors, InvalidInput):
    """So many rows cannot be sent that the batch fails, whatever a server answers. The next try finds the same."""


class JournalFailed(BatchFailed):
    """The journal of a batch, or a file in it, cannot be read or written; the message names it."""


class RequestFailed(BatchError):
    """One request failed; `transient` says whether sending it again can help."""

    def __init__(self, message: str, *, status: int | None = None, transient: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.transient = transient


class TaskInterrupted(VllmError):
    """The task was killed while it worked; raised so that `execute()` unwinds and retries apply."""


def server_failure(
    error: BaseException | None,
) -> StartFailed | ServerLost | PreflightFailed | None:
    """The failure of a server that `error` is, or that caused it: a batch whose server did not come
    back is a BatchFailed, and the diagnosis is the server's."""
    while error is not None:
        if isinstance(error, (StartFailed, ServerLost, PreflightFailed)):
            return error
        error = error.__cause__
    return None
