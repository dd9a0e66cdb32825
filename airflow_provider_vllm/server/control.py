"""The supervisor's HTTP endpoint and its client.

    GET  /status             the state as JSON
    GET  /log?offset=N       vllm.log from byte N on, 256 KiB at most; header X-Log-Size
    POST /renew              {"idle_timeout": seconds?}   the lease starts anew
    POST /release            the server no longer ends with the task that started it
    POST /stop               {"reason": text?}            202, the stop goes on in the background

Each request carries a bearer token that is made from the server's key and the nonce of this start,
so whoever may use the server may stop it, and a token of an earlier start stops nothing. No path from
a request is ever opened; bodies are limited to 64 KiB. A number is finite: a lease has an end.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_provider_vllm.exceptions import ServerUnreachable

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY = 64 * 1024
MAX_IDLE_S = 366 * 86400
MAX_LOG = 256 * 1024

_OFFSET = re.compile(r"[0-9]{1,18}")


def token_for(key: str, nonce: str) -> str:
    """The control token of one start of a server: HMAC-SHA256 of its nonce under its key."""
    return hmac.new(key.encode(), b"control:" + nonce.encode(), hashlib.sha256).hexdigest()


def build_app(
    *,
    token: str,
    log_file: Path,
    status: Callable[[], Mapping[str, Any]],
    renew: Callable[[float | None], None],
    release: Callable[[], None],
    stop: Callable[[str], None],
) -> web.Application:
    """The endpoint; what it does is in the callables."""
    from aiohttp import web

    @web.middleware
    async def only_with_token(
        request: web.Request, handler: Callable[[web.Request], Any]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {token}".encode()):
            return web.json_response({"error": "unauthorized"}, status=401)
        return await handler(request)

    async def get_status(_: web.Request) -> web.Response:
        return web.json_response(dict(status()), dumps=lambda data: json.dumps(data, default=list))

    async def get_log(request: web.Request) -> web.Response:
        offset = request.query.get("offset", "0")
        if not _OFFSET.fullmatch(offset):
            return web.json_response({"error": "offset has to be a number of bytes"}, status=400)
        try:
            with log_file.open("rb") as lines:
                size = lines.seek(0, 2)
                lines.seek(min(int(offset), size))
                data = lines.read(MAX_LOG)
        except FileNotFoundError:
            size, data = 0, b""
        return web.Response(
            body=data, content_type="application/octet-stream", headers={"X-Log-Size": str(size)}
        )

    async def post_renew(request: web.Request) -> web.Response:
        value = (await _body(request)).get("idle_timeout")
        if value is not None and not _is_duration(value):
            return web.json_response(
                {"error": "idle_timeout has to be a number of seconds"}, status=400
            )
        renew(value)
        return web.json_response({})

    async def post_release(_: web.Request) -> web.Response:
        release()
        return web.json_response({})

    async def post_stop(request: web.Request) -> web.Response:
        stop(str((await _body(request)).get("reason") or "asked"))
        return web.json_response({}, status=202)

    app = web.Application(middlewares=[only_with_token], client_max_size=MAX_BODY)
    app.add_routes(
        [
            web.get("/status", get_status, allow_head=False),
            web.get("/log", get_log, allow_head=False),
            web.post("/renew", post_renew),
            web.post("/release", post_release),
            web.post("/stop", post_stop),
        ]
    )
    return app


async def _body(request: web.Request) -> dict[str, Any]:
    from aiohttp import web

    if not request.can_read_body:
        return {}
    try:
        data = json.loads(await request.read())
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        text = '{"error": "the body is no JSON object"}'
        raise web.HTTPBadRequest(text=text, content_type="application/json")
    return data


def _is_duration(value: object) -> bool:
    """Whether it is a number of seconds: positive, finite (JSON of Python knows NaN and Infinity), no year."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 < value <= MAX_IDLE_S
    )


class ControlClient:
    """Talks to one supervisor. Every method raises ServerUnreachable when it gets no good answer."""

    def __init__(self, control_url: str, token: str, *, timeout: float = 5.0) -> None:
        self._url, self._token, self._timeout = control_url, token, timeout
        try:
            parts = urlsplit(control_url)
            self._host, self._port = parts.hostname or "", parts.port or 0
        except ValueError:
            self._host, self._port = "", 0
        if not self._host or not self._port:
            raise ServerUnreachable(f"{control_url!r} is no address of a supervisor.")

    def status(self) -> dict[str, Any]:
        return self._json("GET", "/status")

    def log(self, offset: int = 0) -> tuple[bytes, int]:
        """vllm.log from byte `offset` on, and its whole size."""
        body, headers = self._request("GET", f"/log?offset={int(offset)}", None)
        return body, int(headers.get("X-Log-Size") or 0)

    def renew(self, idle_timeout: float | None = None) -> None:
        self._json("POST", "/renew", {"idle_timeout": idle_timeout} if idle_timeout else {})

    def release(self) -> None:
        self._json("POST", "/release", {})

    def stop(self, reason: str) -> None:
        self._json("POST", "/stop", {"reason": reason})

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        data, _ = self._request(method, path, body)
        try:
            return dict(json.loads(data))
        except (ValueError, TypeError, RecursionError):
            raise ServerUnreachable(f"{self._url}{path} answered what is no JSON.") from None

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[bytes, Mapping[str, str]]:
        # http.client and no environment: control traffic never goes through a proxy.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read(8 * 1024 * 1024)
        except (OSError, http.client.HTTPException) as exc:
            raise ServerUnreachable(
                f"The supervisor at {self._url} does not answer ({type(exc).__name__}: {exc}). It may be gone, or "
                "this worker can't reach its host."
            ) from None
        finally:
            connection.close()
        if response.status >= 300:
            raise ServerUnreachable(
                f"The supervisor at {self._url} answered {response.status} to {path.partition('?')[0]}: another "
                "process has its port, or the server was started again with another key."
            )
        return data, dict(response.getheaders())
