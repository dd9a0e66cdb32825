"""The teardown task: a handle goes in, and nothing of the server is left when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperator

from airflow_provider_vllm import worker
from airflow_provider_vllm.operators.literals import Literals, naming

if TYPE_CHECKING:
    from airflow.sdk import Context, XComArg


class StopVllmServerOperator(BaseOperator):
    """Stop a server, whatever start of it runs now. Idempotent; a server that is gone is fine.

    :param server: the handle from StartVllmServerOperator.

    Raises StopFailed when processes are left, ServerUnreachable when the server is on another host and
    its supervisor does not answer.
    """

    template_fields: Sequence[str] = ("server",)
    ui_color = "#f0e0d8"

    def __init__(
        self, *, server: Mapping[str, Any] | XComArg, retries: int = 2, **kwargs: Any
    ) -> None:
        super().__init__(retries=retries, **kwargs)
        with naming(type(self).__name__, self.task_id):
            Literals(self.get_dag()).check_server(server)
        self.server: Any = server

    def execute(self, context: Context) -> None:
        from airflow_provider_vllm.server.handle import ServerHandle
        from airflow_provider_vllm.server.stop import stop_remote, stop_server

        if self.server is None:
            self.log.info("no server was started, nothing to stop")
            return
        handle = ServerHandle.of(self.server)
        handle.require_reachable()
        reason = f"teardown {worker.task_label(context)}"
        if handle.on_this_host:
            done = stop_server(worker.state_root(), handle.server_id, reason)
        else:
            key = worker.secret(str(handle.spec["auth_conn_id"]), "auth_conn_id")
            done = [stop_remote(handle.control_url, key, handle.nonce, reason)]
        for stopped in done:
            if stopped.how != "already":
                self.log.info(
                    "server %s: %s, %.1f s", handle.server_id, stopped.how, stopped.seconds
                )
        if all(stopped.how == "already" for stopped in done):
            self.log.info("server %s was already gone", handle.server_id)
