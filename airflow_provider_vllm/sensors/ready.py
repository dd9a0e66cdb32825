"""Waiting for a server that was started with `wait_for_ready=False`, or that somebody else runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseSensorOperator, PokeReturnValue

from airflow_provider_vllm import worker
from airflow_provider_vllm.exceptions import InvalidInput, ServerUnreachable
from airflow_provider_vllm.operators.literals import Literals, naming
from airflow_provider_vllm.operators.publish import publish

if TYPE_CHECKING:
    from airflow.sdk import Context, XComArg


class VllmServerReadySensor(BaseSensorOperator):
    """Wait until a server is ready; fails at once, with the diagnosis, when it has crashed.

    :param server: a handle from StartVllmServerOperator, or
    :param vllm_conn_id: a connection of type `vllm`, whose server is asked until it answers; fails at once
        where there is no such connection, or its key is refused.

    Modes poke (looks every 5 s) and reschedule (every 30 s: Airflow may take some seconds to hear that
    a look is over, and a task that is queued again before that counts as lost by its executor).
    XCom: the handle, completed with the server's URL.
    """

    template_fields: Sequence[str] = ("server", "vllm_conn_id")
    ui_color = "#e8f0d8"

    def __init__(
        self,
        *,
        server: Mapping[str, Any] | XComArg | None = None,
        vllm_conn_id: str | None = None,
        mode: str = "poke",
        poke_interval: float | None = None,
        **kwargs: Any,
    ) -> None:
        if poke_interval is None:
            poke_interval = 30 if mode == "reschedule" else 5
        super().__init__(mode=mode, poke_interval=poke_interval, **kwargs)
        with naming(type(self).__name__, self.task_id):
            if (server is None) == (vllm_conn_id is None):
                raise InvalidInput("give exactly one of server and vllm_conn_id.")
            Literals(self.get_dag()).check_server(server)
        self.server: Any = server
        self.vllm_conn_id = vllm_conn_id

    def poke(self, context: Context) -> PokeReturnValue | bool:
        if self.vllm_conn_id is not None:
            from airflow_provider_vllm.hooks.vllm import VllmHook

            try:
                self.log.info(VllmHook(self.vllm_conn_id).check())
            except ServerUnreachable as exc:
                self.log.info("not yet: %s", exc)
                return False
            return True
        return self._poke_handle(context)

    def _poke_handle(self, context: Context) -> PokeReturnValue | bool:
        from airflow_provider_vllm.server import readiness
        from airflow_provider_vllm.server.handle import ServerHandle

        handle = ServerHandle.of(self.server)
        handle.require_reachable()
        current, alive, log_path = _look(handle)
        outcome = readiness.decide(current, supervisor_alive=alive, now=time.time())
        self.log.info(outcome.message)
        if outcome.verdict == readiness.WAIT:
            return False
        if outcome.verdict == readiness.HAS_FAILED:
            error = readiness.start_error(current, outcome.message, log_path, "")
            publish(error, context, self.log)
            raise error
        done = {**handle.to_json(), "base_url": current.base_url}
        return PokeReturnValue(is_done=True, xcom_value=done)


def _look(handle: Any) -> tuple[Any, bool, str]:
    """The state of a handle's server, whether its supervisor lives, and where its log is; renews the lease."""
    from airflow_provider_vllm.server.control import ControlClient, token_for
    from airflow_provider_vllm.server.state import ServerState

    if handle.on_this_host:
        directory = worker.state_root().newest(handle.server_id)
        current = directory.read() if directory else None
        if directory is None or current is None:
            raise ServerUnreachable(
                f"The directory of server {handle.server_id} is gone from this worker. Clear the start task."
            )
        client = ControlClient(
            current.control_url or "", token_for(directory.key() or "", current.nonce)
        )
        with contextlib.suppress(ServerUnreachable):
            client.renew()
        return current, current.supervisor_alive, str(directory.log_file)
    key = worker.secret(str(handle.spec["auth_conn_id"]), "auth_conn_id")
    client = ControlClient(handle.control_url, token_for(key, handle.nonce))
    current = ServerState.from_json(client.status())
    client.renew()
    return current, True, f"vllm.log of {handle.server_id} on {handle.host}"
