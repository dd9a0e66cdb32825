"""Connection type `vllm`: a connection goes in, an `openai` client comes out."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow.providers.common.compat.sdk import BaseHook

from airflow_provider_vllm.exceptions import InvalidInput, ServerUnreachable, VllmError

if TYPE_CHECKING:
    import openai

    from airflow_provider_vllm.batch.endpoint import Endpoint


class VllmHook(BaseHook):
    """An OpenAI-compatible server behind a connection.

    Connection: `host` (with `http://` or `https://`, or `schema`), `port`, `password` the API key, extra
    `model` the served name (default: the first that the server lists) and `timeout` in seconds.
    """

    conn_name_attr = "vllm_conn_id"
    default_conn_name = "vllm_default"
    conn_type = "vllm"
    hook_name = "vLLM"

    def __init__(self, vllm_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vllm_conn_id = vllm_conn_id

    def get_conn(self) -> openai.OpenAI:
        """An `openai.OpenAI` client of this server. Raises InvalidInput for a connection without a host."""
        import openai

        base_url, key, extra = self._connection()
        # The client insists on a key; a server without one ignores it.
        return openai.OpenAI(
            base_url=f"{base_url}/v1",
            api_key=key or "none",
            timeout=self._timeout(extra),
        )

    def endpoint(self) -> Endpoint:
        """The Endpoint for a batch. Raises InvalidInput where no model is named and none is listed."""
        from airflow_provider_vllm.batch.endpoint import Endpoint

        base_url, key, extra = self._connection()
        return Endpoint(
            base_url=base_url, model=self._model(extra) or self._first_model(), api_key=key
        )

    def check(self) -> str:
        """What the server serves, in a sentence.

        Raises ServerUnreachable while it does not answer, is not healthy (as a batch sees it: a server
        without `/health` is) or does not serve the connection's model, which may change by itself,
        and InvalidInput for what only a person can put right: a connection that says too little, a key
        that the server refuses.
        """
        from airflow_provider_vllm.batch.endpoint import Endpoint
        from airflow_provider_vllm.batch.health import is_healthy

        base_url, key, extra = self._connection()
        served = self._served()
        wanted = self._model(extra)
        what = f"{base_url} serves {', '.join(served) or 'nothing'}"
        if wanted and wanted not in served:
            raise ServerUnreachable(f"{what}, not {wanted} (extra `model`)")
        if not served:
            raise ServerUnreachable(f"{what}: it lists no model yet")
        if fault := is_healthy(Endpoint(base_url, wanted or served[0], key)):
            raise ServerUnreachable(f"{what}, and is not healthy: {fault}")
        return what

    def test_connection(self) -> tuple[bool, str]:
        """Whether the server answers with the connection's key and serves its model."""
        try:
            return True, self.check()
        except VllmError as exc:
            return False, str(exc)
        except Exception as exc:
            return False, f"{type(exc).__name__}: {exc}"

    def _served(self) -> list[str]:
        import openai

        what = f"The server of connection {self.vllm_conn_id!r} at {self._connection()[0]}"
        client = self.get_conn().with_options(timeout=10, max_retries=0)
        try:
            with client:
                served = [model.id for model in client.models.list()]
            if not all(isinstance(name, str) and name for name in served):
                raise TypeError("a model without an id")
            return served
        except (openai.AuthenticationError, openai.PermissionDeniedError) as exc:
            raise InvalidInput(
                f"{what} refuses the key (HTTP {exc.status_code}). Give the connection the server's key as its "
                "password."
            ) from None
        except openai.OpenAIError as exc:
            cause = f" ({exc.__cause__})" if exc.__cause__ else ""
            raise ServerUnreachable(
                f"{what} does not list its models: {exc}{cause}. See that it runs, that this worker reaches it, "
                "and that the connection names what stands before /v1 in its URLs."
            ) from None
        except (AttributeError, TypeError, ValueError, RecursionError):
            # What the client makes of an answer in another form, JSON or not.
            raise ServerUnreachable(
                f"{what} answers /v1/models with something else than a list of models. See that it is a vLLM "
                "or another OpenAI-compatible server, and no page of a proxy."
            ) from None

    def _first_model(self) -> str:
        served = self._served()
        if not served:
            raise InvalidInput(f"The server of connection {self.vllm_conn_id!r} serves no model.")
        return served[0]

    def _connection(self) -> tuple[str, str | None, dict[str, Any]]:
        from airflow_provider_vllm.server.order import check_key

        found, this = self.get_connection(self.vllm_conn_id), f"Connection {self.vllm_conn_id!r}"
        extra = found.extra_dejson
        if not isinstance(extra, dict):
            raise InvalidInput(f"{this}: extra has to be a JSON object.")
        key = (found.password or "").strip()
        base = base_url_of(found.host or "", found.port, found.schema)
        if base is None:
            raise InvalidInput(
                f"{this} has no host: give for example http://gpu-host and port 8000."
            )
        if fault := fault_of_url(base):
            raise InvalidInput(
                f"{this} makes the URL {base!r}, and {fault}: give for example http://gpu-host and port 8000."
            )
        return base, check_key(key, this) if key else None, extra

    def _model(self, extra: dict[str, Any]) -> str | None:
        model = extra.get("model")
        if model is not None and not isinstance(model, str):
            raise InvalidInput(
                f"Connection {self.vllm_conn_id!r}: extra `model` is {model!r}: give the served name, a text."
            )
        return model or None

    def _timeout(self, extra: dict[str, Any]) -> float:
        given = extra.get("timeout") or 600
        try:
            seconds = float(given)
        except (TypeError, ValueError):
            seconds = 0
        if not 0 < seconds < math.inf:
            raise InvalidInput(
                f"Connection {self.vllm_conn_id!r}: extra `timeout` is {given!r}: "
                "give a number of seconds above 0."
            )
        return seconds


def fault_of_url(url: str) -> str | None:
    """What keeps a client from using `url`; None where nothing does. Pure."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname or "", parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "its scheme is neither http nor https"
    if not re.fullmatch(r"[A-Za-z0-9_.:-]+", name) or name.startswith(".") or ".." in name:
        return "it names no host"
    if port == 0:
        return "its port is 0"
    if parts.query or parts.fragment or re.search(r"\s", url):
        return "it holds more than scheme, host, port and path"
    return None


def base_url_of(host: str, port: int | None, schema: str | None) -> str | None:
    """The URL before `/v1` of a connection's host, port and schema; None without a host. Pure.

    Credentials in the host are dropped: the key is the connection's password.
    """
    host = host.strip().rstrip("/")
    if host in ("", "http:", "https:"):
        return None
    if "://" not in host:
        host = f"{schema or 'http'}://{host}"
    scheme, _, rest = host.partition("://")
    name, slash, path = rest.partition("/")
    name = name.rpartition("@")[2]
    if name.count(":") > 1 and not name.startswith("["):
        name = f"[{name}]"
    if port and ":" not in name.rpartition("]")[2]:
        name = f"{name}:{port}"
    return f"{scheme}://{name}{slash}{path}".removesuffix("/v1")
