"""A server that somebody else runs, as a `batch.endpoint.ServerLink`: when it is lost there is only waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_provider_vllm.batch.endpoint import Endpoint, Probe
from airflow_provider_vllm.exceptions import ServerLost, ServerUnreachable

FOREIGN_PATIENCE_S = 600.0
TELL_S = 10.0


class ForeignEndpoint:
    """An OpenAI-compatible server that somebody else runs."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        report: Callable[[str], None],
        patience: float = FOREIGN_PATIENCE_S,
    ) -> None:
        self._endpoint, self._report, self._patience = endpoint, report, patience

    @property
    def connected(self) -> bool:
        return True

    def planned(self) -> Endpoint:
        return self._endpoint

    def connect(self) -> Endpoint:
        return self._endpoint

    def renew(self) -> None:
        """Somebody else's server has no lease of ours."""

    def recover(self, reason: str, *, by_row: bool, probe: Probe) -> Endpoint:
        self._report(
            f"{self._endpoint.base_url} was lost ({reason}); waiting up to {self._patience:g} s for it"
        )
        return wait_for(self._look, probe, self._patience, reason, self._report)

    def abandon(self) -> None:
        """Nothing of ours to end."""

    def close(self) -> None:
        """Nothing of ours to end."""

    def _look(self) -> Endpoint:
        from airflow_provider_vllm.batch.client import request

        # As the batch itself sends: the same proxies, certificates and key.
        status, body = request(self._endpoint, "/v1/models", 10)
        if status == 200:
            return self._endpoint
        said = body[:200].decode(errors="replace") if status == 0 else f"HTTP {status}"
        raise ServerLost(f"{self._endpoint.base_url} does not answer: {said}")


def wait_for(
    look: Callable[[], Endpoint],
    probe: Probe,
    patience: float,
    reason: str,
    report: Callable[[str], None],
) -> Endpoint:
    """Ask again with growing pauses, until the server answers `probe`. Raises ServerLost after `patience` seconds.

    What it says meanwhile is reported every `TELL_S` seconds.
    """
    told = time.monotonic()
    deadline = told + patience
    pause = 1.0
    while True:
        try:
            endpoint = look()
            if (wrong := probe(endpoint)) is None:
                return endpoint
            raise ServerLost(f"{endpoint.base_url} does not answer: {wrong}")
        except (ServerLost, ServerUnreachable) as exc:
            now = time.monotonic()
            if now + pause > deadline:
                raise ServerLost(
                    f"The server was lost ({reason}) and did not come back within {patience:g} s: {exc}"
                ) from None
            if now >= told + TELL_S:
                told = now
                report(f"still waiting for the server, {deadline - now:.0f} s more: {exc}")
        time.sleep(pause)
        pause = min(pause * 2, 30.0)
