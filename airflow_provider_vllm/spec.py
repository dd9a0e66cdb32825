"""What server is wanted: a ServerSpec goes in, a command line, an environment and a fingerprint come out.

Invariants: a ServerSpec is valid once it exists; it holds no secret that has a connection (only the
connection's id); nothing of it can set an option that the provider owns.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any

from airflow_provider_vllm.environment import MASK, START_MARK, looks_secret
from airflow_provider_vllm.exceptions import InvalidSpec

# Options that a field of ServerSpec or the provider itself sets, and what to use instead.
OWNED_ARGS: dict[str, str] = {
    "api_key": "use the field auth_conn_id (a random key is used without it)",
    "config": "write the options into engine_args",
    "data_parallel_multi_port_external_lb": "start one server for each replica",
    "data_parallel_supervisor_port": "start one server for each replica",
    "disable_log_stats": "the provider reads vLLM's counters",
    "disable_log_requests": "use enable_log_requests=False",
    "hf_token": "use the field hf_conn_id",
    "grpc": "the provider speaks HTTP",
    "grpc_port": "the provider speaks HTTP",
    "headless": "the provider needs the API server",
    "host": "use the field host",
    "lora_modules": "use the field lora_modules",
    "model": "use the field model",
    "port": "use the field port",
    "root_path": "the provider calls the server at its root",
    "served_model_name": "use the field served_model_name",
    "ssl_ca_certs": "put a TLS proxy before the server",
    "ssl_certfile": "put a TLS proxy before the server",
    "ssl_keyfile": "put a TLS proxy before the server",
    "uds": "the provider speaks TCP",
}

# Variables that the provider sets, and what to use instead.
OWNED_ENV: dict[str, str] = {
    "VLLM_API_KEY": "use the field auth_conn_id",
    "CUDA_VISIBLE_DEVICES": "use the field gpus, whose choice is locked against other servers",
    START_MARK: "the provider finds a server's processes by it",
}

# vLLM 0.32's options that are plain store-true: they have no --no-… form (read from its parser).
STORE_TRUE_ARGS = frozenset({"aggregate_engine_logging"})

_ARG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")
_SCALARS = (str, int, float)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class ServerSpec:
    """One vLLM server.

    :param model: local path or hub id.
    :param served_model_name: name that clients use; default: last part of `model`.
    :param gpus: how many GPUs, or their UUIDs; None: 1 where an NVIDIA driver is present, else 0 (CPU build).
    :param engine_args: vLLM's options by name; True gives `--name`, False `--no-name`, None nothing,
        a list `--name a b`, a mapping JSON.
    :param env: environment variables added to the allow-list of `airflow_provider_vllm.environment`.
    :param python: interpreter that has vLLM; default: `[vllm] python`, else the running one.
    :param command: a full command instead of `python`, with `{port}` (and `{host}`, `{model}`) filled in.
    :param host, port: where vLLM listens; port 0 takes a free one and tries another when it is taken.
    :param auth_conn_id: connection whose password is the server's key; needed beyond loopback.
    :param hf_conn_id: connection whose password is the hub token.
    :param startup_timeout: seconds for one attempt to become ready.
    :param start_attempts: attempts within one try of the task.
    :param gpu_wait_timeout: seconds in all to wait for a free GPU.
    :param idle_timeout: seconds without a renewal and without movement until the server ends itself.
    :param max_lifetime: seconds until the server ends itself in any case; None: no limit.
    :param lora_modules: adapters by name; sets `--max-lora-rank` from their adapter_config.json.
    :param preflight: what to do with a finding of the checks before the start: "fail", "warn" or "off".

    Raises InvalidSpec, naming the field.
    """

    model: str
    served_model_name: str = ""
    gpus: int | tuple[str, ...] | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    python: str | None = None
    command: tuple[str, ...] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    auth_conn_id: str | None = None
    hf_conn_id: str | None = None
    startup_timeout: float = 1200
    start_attempts: int = 2
    gpu_wait_timeout: float = 3600
    idle_timeout: float = 900
    max_lifetime: float | None = None
    lora_modules: Mapping[str, str] | None = None
    preflight: str = "fail"

    def __post_init__(self) -> None:
        _text("model", self.model)
        name = self.served_model_name or PurePosixPath(self.model.rstrip("/")).name
        self._set("served_model_name", _text("served_model_name", name))
        self._set("gpus", _gpus(self.gpus))
        self._set("engine_args", _engine_args(self.engine_args))
        self._set("env", _env(self.env))
        self._set("command", _command(self.command))
        for name in ("python", "auth_conn_id", "hf_conn_id"):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name))
        _host(self.host)
        _number("port", self.port, low=0, high=65535, whole=True)
        for name in ("startup_timeout", "idle_timeout"):
            _number(name, getattr(self, name), low=1)
        _number("start_attempts", self.start_attempts, low=1, whole=True)
        _number("gpu_wait_timeout", self.gpu_wait_timeout, low=0)
        if self.max_lifetime is not None:
            _number("max_lifetime", self.max_lifetime, low=1)
        if self.preflight not in ("fail", "warn", "off"):
            raise InvalidSpec(
                f"ServerSpec.preflight is {self.preflight!r}: use 'fail', 'warn' or 'off'."
            )
        self._set("lora_modules", _lora(self.lora_modules))
        if not is_loopback(self.host) and not self.auth_conn_id:
            raise InvalidSpec(
                f"ServerSpec.host {self.host!r} is reachable from other machines and there is no password. "
                "Set auth_conn_id to a connection whose password is the server's key, or use host='127.0.0.1'."
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: ServerSpec | Mapping[str, Any]) -> ServerSpec:
        """A ServerSpec from itself or from a mapping of its fields. Raises InvalidSpec."""
        if isinstance(value, ServerSpec):
            return value
        if not isinstance(value, Mapping):
            raise InvalidSpec(
                f"spec is a {type(value).__name__}: give a ServerSpec or a dict of its fields."
            )
        cls.check_names(value)
        if "model" not in value:
            raise InvalidSpec("ServerSpec.model is missing: give a local path or a hub id.")
        return cls(**value)

    @classmethod
    def check_names(cls, value: Mapping[str, Any]) -> None:
        """Raises InvalidSpec where `value` has a key that is no field."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(value) - known, key=str):
            raise InvalidSpec(
                f"ServerSpec has no field {', '.join(map(repr, unknown))}. Options of vLLM go into "
                f"engine_args. Fields: {', '.join(sorted(known))}."
            )

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, `env` in clear: for the worker's own state directory only."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("gpus", "command"):
            if isinstance(out[name], tuple):
                out[name] = list(out[name])
        for name in ("engine_args", "env", "lora_modules"):
            if out[name] is not None:
                out[name] = dict(out[name])
        return out

    def public(self) -> dict[str, Any]:
        """The same without what looks like a secret in `env`: for XCom, logs and the rendered template."""
        out = self.to_json()
        out["env"] = {k: MASK if looks_secret(k) else v for k, v in self.env.items()}
        return out

    def masked(self) -> dict[str, Any]:
        """The same with all of `env` masked: for views."""
        return {**self.to_json(), "env": dict.fromkeys(self.env, MASK)}

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with whatever can change an answer (model, options, adapters)."""
        relevant = {
            "model": self.model,
            "engine_args": self.engine_args,
            "lora_modules": self.lora_modules,
            "command": self.command,
        }
        text = json.dumps(relevant, sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def engine_argv(self) -> list[str]:
        """`engine_args` as command line words. Values stay glued to their option: a value that
        starts with a dash can't become an option of its own."""
        out: list[str] = []
        for name, value in self.engine_args.items():
            out += _option(name, value)
        return out


def _option(name: str, value: Any) -> list[str]:
    # The name's first part is a flag; what follows a dot is a key of a JSON option, kept as written.
    head, dot, rest = name.partition(".")
    flag = "--" + head.replace("_", "-") + dot + rest
    if value is None:
        return []
    if value is True:
        return [flag]
    if value is False:
        return [] if head.replace("-", "_") in STORE_TRUE_ARGS else ["--no-" + flag[2:]]
    if isinstance(value, Mapping):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [flag, *(str(item) for item in value)] if value else []
    return [f"{flag}={value}"]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidSpec(f"ServerSpec.{name} is {value!r}: it has to be a text that is not empty.")
    if "\0" in value or "\n" in value:
        raise InvalidSpec(f"ServerSpec.{name} holds a line break or NUL: give one line.")
    if value.startswith("-"):
        raise InvalidSpec(f"ServerSpec.{name} is {value!r}: it would be read as an option of vLLM.")
    return value


def _host(value: Any) -> None:
    if not _HOST.fullmatch(_text("host", value)):
        raise InvalidSpec(
            f"ServerSpec.host is {value!r}: give one address or host name, without scheme and port."
        )


def _number(
    name: str, value: Any, *, low: float, high: float | None = None, whole: bool = False
) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (whole and not isinstance(value, int))
    ):
        raise InvalidSpec(
            f"ServerSpec.{name} is {value!r} ({type(value).__name__}): give {'an integer' if whole else 'a number'}."
        )
    if not low <= value < math.inf or (high is not None and value > high):
        limit = f"at least {low:g}" + (f" and at most {high:g}" if high is not None else "")
        raise InvalidSpec(f"ServerSpec.{name} is {value!r}: it has to be {limit}.")


def _gpus(value: Any) -> int | tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        _number("gpus", value, low=0, whole=True)
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        uuids = tuple(_text("gpus", item) for item in value)
        bad = [u for u in uuids if not re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]+", u)]
        if bad or len(set(uuids)) != len(uuids):
            raise InvalidSpec(
                f"ServerSpec.gpus is {list(uuids)!r}: give a count, or different UUIDs as "
                "`nvidia-smi -L` prints them (GPU-… or MIG-…)."
            )
        return uuids
    raise InvalidSpec(f"ServerSpec.gpus is {value!r}: give a count or a list of GPU UUIDs.")


def _engine_args(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidSpec(f"ServerSpec.engine_args is a {type(value).__name__}: give a dict.")
    return {name: _engine_arg(name, item) for name, item in value.items()}


def _engine_arg(name: Any, value: Any) -> Any:
    where = f"ServerSpec.engine_args[{name!r}]"
    if not isinstance(name, str) or not _ARG_NAME.fullmatch(name):
        raise InvalidSpec(
            f"{where} is no option name: write it as in vLLM's help, without dashes before it."
        )
    plain = name.partition(".")[0].replace("-", "_").lower()
    for owned, instead in OWNED_ARGS.items():
        # argparse takes any unambiguous beginning of an option for the option.
        if owned == plain or owned.startswith(plain) or plain == f"no_{owned}":
            raise InvalidSpec(
                f"{where} is set by the provider (--{owned.replace('_', '-')}): {instead}."
            )
    texts = value if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(text, str) and "\0" in text for text in texts):
        raise InvalidSpec(f"{where} holds a NUL: no command line can.")
    if value is None or isinstance(value, (bool, *_SCALARS)):
        return value
    if isinstance(value, Mapping):
        try:
            # Through JSON and back, so that a spec from a file equals the spec that was written.
            return json.loads(json.dumps(dict(value)))
        except (TypeError, ValueError) as exc:
            raise InvalidSpec(f"{where} can't be written as JSON ({exc}).") from None
    if isinstance(value, (list, tuple)) and all(isinstance(item, _SCALARS) for item in value):
        for item in value:
            if str(item).startswith("-"):
                raise InvalidSpec(
                    f"{where} has the item {item!r}: an item can't start with a dash."
                )
        return list(value)
    raise InvalidSpec(
        f"{where} is a {type(value).__name__}: give a text, number, True, False, None, a list of texts "
        "and numbers, or a dict."
    )


def _env(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidSpec(f"ServerSpec.env is a {type(value).__name__}: give a dict.")
    for name, item in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InvalidSpec(f"ServerSpec.env has the name {name!r}: it is no name of a variable.")
        if name in OWNED_ENV:
            raise InvalidSpec(f"ServerSpec.env sets {name}: {OWNED_ENV[name]}.")
        if not isinstance(item, str) or "\0" in item:
            raise InvalidSpec(f"ServerSpec.env[{name!r}] is a {type(item).__name__}: give a text.")
    return dict(value)


def _command(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    words = shlex.split(value) if isinstance(value, str) else value
    if (
        not isinstance(words, (list, tuple))
        or not words
        or not all(isinstance(w, str) and "\0" not in w for w in words)
    ):
        raise InvalidSpec(
            f"ServerSpec.command is {value!r}: give a command line or a list of its words."
        )
    if not any("{port}" in word for word in words):
        raise InvalidSpec(
            "ServerSpec.command has no {port}: the provider has to tell the server its port."
        )
    return tuple(words)


def _lora(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str)
        and re.fullmatch(r"\w[^=\0\n]*", k)
        and isinstance(v, str)
        and re.fullmatch(r"[^\0\n]+", v)
        for k, v in value.items()
    ):
        raise InvalidSpec(
            f"ServerSpec.lora_modules is {value!r}: give a dict of adapter name to path."
        )
    return dict(value) or None
