"""A server as other tasks know it: a plain dict in XCom, checked when it comes back.

A handle holds no secret: the key stays in the server's directory, or in the connection that the
spec names. Its spec is enough to start the server again.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from airflow_provider_vllm.exceptions import InvalidHandle, InvalidSpec
from airflow_provider_vllm.names import type_of
from airflow_provider_vllm.server.state import NONCE, GenerationDir, StateRoot, check_server_id
from airflow_provider_vllm.spec import ServerSpec, is_loopback

KIND = "vllm_server"


def _is_url(value: object) -> bool:
    """Whether it is `http://HOST:PORT` and nothing more."""
    if not isinstance(value, str) or not re.fullmatch(r"http://[\w.:\[\]-]+", value):
        return False
    try:
        parts = urlsplit(value)
        return bool(parts.hostname and parts.port and not parts.username)
    except ValueError:
        return False


# What the fields have to be that come back from XCom and are used as they are.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "generation": lambda value: type(value) is int and value > 0,
    "host": lambda value: isinstance(value, str) and bool(value),
    "model": lambda value: isinstance(value, str) and bool(value),
    "control_url": _is_url,
    "base_url": lambda value: value is None or _is_url(value),
}


@dataclass(frozen=True)
class ServerHandle:
    """One start of a server: `generation` and `nonce` name the start, `server_id` the server."""

    server_id: str
    generation: int
    nonce: str
    host: str
    base_url: str | None
    control_url: str
    model: str
    spec: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, **self.__dict__, "spec": dict(self.spec)}

    @classmethod
    def of(cls, value: ServerHandle | Mapping[str, Any]) -> ServerHandle:
        """The handle in `value` (its JSON form). Raises InvalidHandle."""
        if isinstance(value, ServerHandle):
            return value
        if not isinstance(value, Mapping) or value.get("kind") != KIND:
            raise InvalidHandle(
                f"`server` is {type_of(value)} that is no server handle. Give it the output of a "
                "StartVllmServerOperator, for example server=start.output."
            )
        data = {k: v for k, v in value.items() if k in cls.__dataclass_fields__}
        missing = sorted(set(cls.__dataclass_fields__) - set(data))
        if missing:
            raise InvalidHandle(
                f"The server handle has no {', '.join(missing)}: run the start task again."
            )
        check_server_id(data["server_id"])
        if not isinstance(data["nonce"], str) or not NONCE.match(data["nonce"]):
            raise InvalidHandle(
                f"The server handle's nonce is {data['nonce']!r}: run the start task again."
            )
        for name, right in _FIELDS.items():
            if not right(data[name]):
                raise InvalidHandle(
                    f"The server handle's {name} is {data[name]!r}: run the start task again."
                )
        try:
            ServerSpec.of(data["spec"])
        except InvalidSpec as exc:
            raise InvalidHandle(f"The server handle's spec is wrong: {exc}") from None
        return cls(**data)

    @property
    def on_this_host(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def loopback(self) -> bool:
        return is_loopback(str(self.spec.get("host", "127.0.0.1")))

    def require_reachable(self) -> None:
        """Raises InvalidHandle when only its own host reaches the server and this is another one."""
        if not self.on_this_host and self.loopback:
            raise InvalidHandle(
                f"The server {self.server_id} listens on {self.spec.get('host', '127.0.0.1')} of host "
                f"{self.host!r}, and this task runs on {socket.gethostname()!r}. Give start, batch and "
                f"stop a queue that only {self.host!r} serves, or set ServerSpec.host to an address "
                "that others reach, with auth_conn_id."
            )

    def directory(self, root: StateRoot) -> GenerationDir | None:
        """The directory of this very start, when it is on this worker's disk."""
        for generation in root.generations(self.server_id):
            if generation.path.name.endswith(f"-{self.nonce}"):
                return generation
        return None
