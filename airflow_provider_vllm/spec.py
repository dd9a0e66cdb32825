"""What server is wanted: a ServerSpec goes in, a command line, an environment and a fingerprint come out.

Invariants: a ServerSpec is valid once it exists; it holds no secret that has a connection (only the
connection's id); nothing of it can set an option that the provider owns.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from airflow_provider_vllm import fields
from airflow_provider_vllm.environment import MASK, holds_credentials, looks_secret
from airflow_provider_vllm.exceptions import InvalidSpec
from airflow_provider_vllm.names import nearest, type_of

T = TypeVar("T")

# vLLM 0.32's options that are plain store-true: they have no --no-… form (read from its parser).
STORE_TRUE_ARGS = frozenset({"aggregate_engine_logging"})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# vLLM's options that change what a model answers (0.32); all others are for memory, speed and logs.
ANSWER_ARGS = frozenset(
    """
    revision code_revision tokenizer tokenizer_revision tokenizer_mode hf_overrides hf_config_path
    quantization dtype kv_cache_dtype load_format seed chat_template chat_template_content_format
    default_chat_template_kwargs generation_config override_generation_config logits_processors
    runner convert task pooler_config mm_processor_kwargs reasoning_parser max_lora_rank lora_dtype
    """.split()  # noqa: SIM905 - names read better as text
)


def _names_checked(cls: type[T]) -> type[T]:
    """A dataclass whose constructor says of an unknown field where it belongs."""
    made = cls.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **named: Any) -> None:
        cls.check_names(named)  # type: ignore[attr-defined]
        made(self, *args, **named)

    setattr(cls, "__init__", init)  # noqa: B010 - mypy knows no other way
    return cls


@_names_checked
@dataclass(frozen=True)
class ServerSpec:
    """One vLLM server.

    :param model: local path or hub id.
    :param served_model_name: name that answers carry; default: last part of `model`. Clients may use `model`, too.
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
    :param gpu_wait_timeout: seconds to wait for a free GPU, each time that one is needed.
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
        fields.text("model", self.model)
        name = self.served_model_name
        if name is None or (isinstance(name, str) and not name):
            name = PurePosixPath(self.model.rstrip("/")).name
        self._set("served_model_name", fields.text("served_model_name", name))
        self._set("gpus", fields.gpus(self.gpus))
        self._set("engine_args", fields.engine_args(self.engine_args))
        self._set("env", fields.env(self.env))
        self._set("command", fields.command(self.command))
        for name in ("python", "auth_conn_id", "hf_conn_id"):
            if getattr(self, name) is not None:
                fields.text(name, getattr(self, name))
        fields.host(self.host)
        fields.number("port", self.port, low=0, high=65535, whole=True)
        for name in ("startup_timeout", "idle_timeout"):
            fields.number(name, getattr(self, name), low=1)
        fields.number("start_attempts", self.start_attempts, low=1, whole=True)
        fields.number("gpu_wait_timeout", self.gpu_wait_timeout, low=0)
        if self.max_lifetime is not None:
            fields.number("max_lifetime", self.max_lifetime, low=1)
        if not isinstance(self.preflight, str) or self.preflight not in ("fail", "warn", "off"):
            raise InvalidSpec(
                f"ServerSpec.preflight is {self.preflight!r}: use 'fail', 'warn' or 'off'."
            )
        self._set("lora_modules", fields.lora_modules(self.lora_modules))
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
                f"spec is {type_of(value)}: give a ServerSpec or a dict of its fields."
            )
        cls.check_names(value)
        if "model" not in value:
            raise InvalidSpec("ServerSpec.model is missing: give a local path or a hub id.")
        return cls(**value)

    @classmethod
    def check_names(cls, value: Mapping[str, Any]) -> None:
        """Raises InvalidSpec where `value` has a key that is no field, and says where it belongs."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in value:
            if name not in known:
                raise InvalidSpec(f"ServerSpec has no field {name!r}: {_place_of(name, known)}")

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, `env` in clear: for the worker's own state directory only."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
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
        out["env"] = {
            k: MASK if looks_secret(k) or holds_credentials(v) else v for k, v in self.env.items()
        }
        return out

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with what changes answers: model, adapters, and the options that do.

        An option for memory or speed does not count: who lowers one after a failure and presses
        "Clear" keeps the answers that he has.
        """
        named = {name.replace("-", "_"): value for name, value in self.engine_args.items()}
        relevant = {
            "model": self.model,
            "engine_args": {name: named[name] for name in sorted(ANSWER_ARGS & set(named))},
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


def _place_of(name: Any, known: set[str]) -> str:
    """What to write instead of a field that there is not."""
    if name in fields.OWNED_ARGS:
        return f"{fields.OWNED_ARGS[name]}."
    if meant := nearest(name, known):
        return f"did you mean {meant!r}?"
    return (
        f"an option of vLLM goes into engine_args, as engine_args={{{name!r}: ...}}. "
        f"Fields: {', '.join(sorted(known))}."
    )


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
