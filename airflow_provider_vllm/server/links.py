"""The two ways a batch gets a server of ours, as `batch.endpoint.ServerLink`s; the third way is `foreign`.

- `OwnServer`: the task starts it, restarts it when it is lost, and ends with it.
- `SharedServer`: another task started it; whoever finds it dead starts it again, once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from airflow_provider_vllm.batch.endpoint import Endpoint, Probe
from airflow_provider_vllm.exceptions import (
    InvalidHandle,
    ServerLost,
    ServerUnreachable,
    StartFailed,
)
from airflow_provider_vllm.server import readiness, state
from airflow_provider_vllm.server.control import ControlClient, token_for
from airflow_provider_vllm.server.foreign import FOREIGN_PATIENCE_S, wait_for
from airflow_provider_vllm.server.handle import ServerHandle
from airflow_provider_vllm.server.launch import LaunchOptions, handle_of
from airflow_provider_vllm.server.restarts import Restarts
from airflow_provider_vllm.server.start import Running, failure, start, wait
from airflow_provider_vllm.server.state import GenerationDir, ServerState, StateRoot, file_lock
from airflow_provider_vllm.spec import ServerSpec

# A server that a batch started again has no teardown that is sure to come.
LEASE_AFTER_RESTART_S = 120.0


class OwnServer:
    """A server that belongs to one task: `open()` starts it, `close()` ends it."""

    def __init__(
        self,
        spec: ServerSpec,
        server_id: str,
        root: StateRoot,
        options: LaunchOptions,
        *,
        report: Callable[[str], None],
        restarts: int = 2,
        apply_remedy: bool = False,
    ) -> None:
        self._spec, self._id, self._root, self._options = spec, server_id, root, options
        self._report, self._restarts, self._apply_remedy = report, Restarts(restarts), apply_remedy
        self._running: Running | None = None
        self._abandoned = False
        self._launched: list[tuple[ServerHandle, GenerationDir]] = []

    @property
    def connected(self) -> bool:
        """Whether this task has had its server."""
        return self._running is not None

    def planned(self) -> Endpoint:
        return _planned(self._spec, self._spec.served_model_name or "")

    def connect(self) -> Endpoint:
        if self._running is None:
            self._running = self._start(self._apply_remedy)
        return _endpoint(self._running)

    def renew(self) -> None:
        if self._running:
            with contextlib.suppress(ServerUnreachable):
                self._running.control.renew()

    def recover(self, reason: str, *, by_row: bool, probe: Probe) -> Endpoint:
        if not self._restarts.take(time.monotonic(), by_row=by_row):
            raise _lost(
                self._running, f"{reason}; it was restarted as often as server_restarts allows"
            )
        self._report(f"the server was lost ({reason}); starting it again")
        if self._running:
            _refuse_after_stop(self._running.directory)
            _settle(self._running, reason)
        self._running = self._start(False)
        return _endpoint(self._running)

    def abandon(self) -> None:
        """From a signal handler: ask the newest start to end, without waiting for it."""
        self._abandoned = True
        if self._launched:
            ask_to_stop(*self._launched[-1])

    def close(self) -> None:
        """End what this task started, and wait until it is gone. Raises StopFailed.

        After `abandon` it does not wait: a killed task has five seconds to say why it ends, a server may
        take longer, and its supervisor ends it in any case.
        """
        from airflow_provider_vllm.server.stop import stop_generation

        if self._abandoned:
            return
        self._running = None
        while self._launched:
            stop_generation(self._launched[-1][1], "the batch is over")
            self._launched.pop()

    def _start(self, apply_remedy: bool) -> Running:
        running = start(
            self._spec,
            self._id,
            self._root,
            self._options,
            report=self._report,
            apply_remedy=apply_remedy,
            on_launch=lambda handle, directory: self._launched.append((handle, directory)),
        )
        # With the remedy that made it start: the next one needs that too.
        self._spec = order_spec(running.directory) or self._spec
        self._restarts.serves(time.monotonic())
        return running


class SharedServer:
    """A server that another task started, by its handle."""

    def __init__(
        self,
        handle: ServerHandle,
        root: StateRoot,
        options: LaunchOptions,
        *,
        report: Callable[[str], None],
        restarts: int = 2,
    ) -> None:
        handle.require_reachable()
        self._handle, self._root, self._options = handle, root, options
        self._report, self._restarts = report, Restarts(restarts)
        self._key: str | None = options.key
        self._nonce = handle.nonce
        self._control: ControlClient | None = None
        self._restarted = False
        self._launching: tuple[ServerHandle, GenerationDir] | None = None

    @property
    def connected(self) -> bool:
        """Whether this task has had the server."""
        return self._control is not None

    def planned(self) -> Endpoint:
        return _planned(ServerSpec.of(self._handle.spec), self._handle.model)

    def connect(self) -> Endpoint:
        if not self._handle.on_this_host:
            return self._connect_remote()
        return self._connect_local(lost_nonce=None)

    def renew(self) -> None:
        if self._control:
            with contextlib.suppress(ServerUnreachable):
                self._control.renew()

    def recover(self, reason: str, *, by_row: bool, probe: Probe) -> Endpoint:
        if not self._restarts.take(time.monotonic(), by_row=by_row):
            raise ServerLost(f"{reason}; it was restarted as often as server_restarts allows")
        if not self._handle.on_this_host:
            self._report(f"the server on {self._handle.host} was lost ({reason}); waiting for it")
            return wait_for(self._connect_remote, probe, FOREIGN_PATIENCE_S, reason, self._report)
        return self._connect_local(lost_nonce=self._nonce, reason=reason)

    def abandon(self) -> None:
        """The server belongs to others; only a restart that is under way ends with this task."""
        if self._launching:
            ask_to_stop(*self._launching)

    def close(self) -> None:
        """Leave the server to its teardown; one that we started again ends soon by itself."""
        if self._control and self._restarted:
            idle_timeout = float(self._handle.spec.get("idle_timeout") or LEASE_AFTER_RESTART_S)
            with contextlib.suppress(ServerUnreachable):
                self._control.renew(min(LEASE_AFTER_RESTART_S, idle_timeout))

    def _connect_local(self, lost_nonce: str | None, reason: str = "it is gone") -> Endpoint:
        """The newest start of this server if it lives, else a new one; one restarts, the others wait."""
        server_id = self._handle.server_id
        with self._root.server_lock(server_id):
            pass  # makes the directory, and lets a start or stop that is under way finish
        with file_lock(self._root.server_dir(server_id) / "restart"):
            directory = self._root.newest(server_id)
            current = directory.read() if directory else None
            if directory and current and current.nonce != lost_nonce and _lives(current):
                spec = self._spec(directory)
                return self._use(
                    wait(handle_of(current, spec), directory, spec, report=self._report)
                )
            if directory and current and current.nonce == lost_nonce:
                _refuse_after_stop(directory)
            self._report(f"the server {server_id} does not run ({reason}); starting it again")
            return self._use(self._restart(directory))

    def _restart(self, earlier: GenerationDir | None) -> Running:
        spec = self._spec(earlier)
        self._restarted = True
        running = start(
            spec,
            self._handle.server_id,
            self._root,
            self._options,
            report=self._report,
            on_launch=self._note_launch,
        )
        self._launching = None
        # It is shared from now on: it must outlive this task, and its lease ends it.
        running.control.release()
        return running

    def _note_launch(self, handle: ServerHandle, directory: GenerationDir) -> None:
        self._launching = handle, directory

    def _spec(self, directory: GenerationDir | None) -> ServerSpec:
        """The spec with its `env` in clear, which only the worker's own disk holds."""
        from airflow_provider_vllm.environment import MASK

        if directory is not None and (spec := order_spec(directory)) is not None:
            return spec
        spec = ServerSpec.of(self._handle.spec)
        masked = sorted(name for name, value in spec.env.items() if value == MASK)
        if masked:
            raise InvalidHandle(
                f"The server {self._handle.server_id} is gone with its directory, and its spec.env had secrets "
                f"({', '.join(masked)}) that are not in the handle. Clear the start task, which has them."
            )
        return spec

    def _use(self, running: Running) -> Endpoint:
        self._nonce, self._control = running.handle.nonce, running.control
        self.renew()  # its lease may be about to end, and the first report is seconds away
        self._restarts.serves(time.monotonic())
        return _endpoint(running)

    def _connect_remote(self) -> Endpoint:
        if not self._key:
            raise InvalidHandle(
                "The server runs on another host: its spec needs auth_conn_id for the key."
            )
        self._control = ControlClient(
            self._handle.control_url, token_for(self._key, self._handle.nonce)
        )
        self.renew()
        current = ServerState.from_json(self._control.status())
        if current.state != state.READY or not current.base_url:
            raise ServerLost(
                f"The server on {current.host} is {current.state}: {current.message or 'not ready'}"
            )
        self._restarts.serves(time.monotonic())
        fingerprint = ServerSpec.of(self._handle.spec).fingerprint
        return Endpoint(
            current.base_url, current.model, self._key, owned=True, fingerprint=fingerprint
        )


def order_spec(directory: GenerationDir) -> ServerSpec | None:
    """What a start was told to start, its `env` in clear; None where its directory is gone."""
    from airflow_provider_vllm.server.order import Order

    try:
        return Order.read(directory).spec
    except FileNotFoundError:
        return None


def ask_to_stop(handle: ServerHandle, directory: GenerationDir) -> None:
    """Ask a start to end without waiting; falls back to a signal. Never raises."""
    import signal

    current = directory.read()
    key = directory.key()
    try:
        if key:
            ControlClient(handle.control_url, token_for(key, handle.nonce), timeout=1.0).stop(
                "task killed"
            )
            return
    except ServerUnreachable:
        pass
    if current and current.supervisor:
        current.supervisor.signal(signal.SIGTERM)


def _endpoint(running: Running) -> Endpoint:
    return Endpoint(
        running.state.base_url or "",
        running.state.model,
        running.key,
        owned=True,
        fingerprint=ServerSpec.of(running.handle.spec).fingerprint,
    )


def _planned(spec: ServerSpec, model: str) -> Endpoint:
    known = (model, spec.served_model_name, spec.model, *(spec.lora_modules or ()))
    names = () if spec.command else known  # a command may serve anything
    return Endpoint("", model, owned=True, fingerprint=spec.fingerprint, names=names)


def _refuse_after_stop(directory: GenerationDir) -> None:
    """Raises ServerLost when the server's end was asked for: its teardown ran, or a newer try of the task
    took over, while this one had not been killed yet. To start it again would leave it to nobody."""
    current = directory.read()
    if current and current.reason == "asked" and current.state in (state.DRAINING, state.STOPPED):
        raise ServerLost(
            f"The server {current.server_id} was {current.message} while this batch ran, so this try does not start "
            "it again. A retry does, and sends only the rows without an answer."
        )


def _lives(current: ServerState) -> bool:
    return current.supervisor_alive and current.state in (*state.STARTING_STATES, state.READY)


def _settle(running: Running, reason: str, timeout: float = readiness.SETTLE_S) -> None:
    """Give a supervisor that has noticed the end itself the time to write its diagnosis."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        current = running.directory.read()
        if current is None or current.settled or current.state == state.READY:
            return
        time.sleep(0.1)


def _lost(running: Running | None, reason: str) -> ServerLost:
    if running is None:
        return ServerLost(f"The server was lost: {reason}.")
    _settle(running, reason)
    current = running.directory.read()
    if current is None or current.state not in state.ENDED_STATES:
        return ServerLost(f"The server was lost: {reason}.")
    error = failure(running.directory, current, f"{current.message}; {reason}")
    text = str(error).replace("vLLM did not become ready", "The server was lost", 1)
    if isinstance(error, StartFailed):
        return ServerLost(text, diagnosis=error.diagnosis, report=error.report)
    return ServerLost(text)
