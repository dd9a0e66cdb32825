"""What each field of a ServerSpec may be: a value goes in, the value as it is kept comes out.

Each raises InvalidSpec, naming the field and what to give instead. Invariant: no value that passes can become
an option of vLLM that the provider sets itself.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from airflow_provider_vllm.environment import START_MARK
from airflow_provider_vllm.exceptions import InvalidSpec
from airflow_provider_vllm.names import type_of

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

_ARG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")
_SCALARS = (str, int, float)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidSpec(f"ServerSpec.{name} is {value!r}: it has to be a text that is not empty.")
    if "\0" in value or "\n" in value:
        raise InvalidSpec(f"ServerSpec.{name} holds a line break or NUL: give one line.")
    if value.startswith("-"):
        raise InvalidSpec(f"ServerSpec.{name} is {value!r}: it would be read as an option of vLLM.")
    return value


def host(value: Any) -> None:
    if not _HOST.fullmatch(text("host", value)):
        raise InvalidSpec(
            f"ServerSpec.host is {value!r}: give one address or host name, without scheme and port."
        )


def number(
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


def gpus(value: Any) -> int | tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        number("gpus", value, low=0, whole=True)
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        uuids = tuple(text("gpus", item) for item in value)
        bad = [u for u in uuids if not re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]+", u)]
        if bad or len(set(uuids)) != len(uuids):
            raise InvalidSpec(
                f"ServerSpec.gpus is {list(uuids)!r}: give a count, or different UUIDs as "
                "`nvidia-smi -L` prints them (GPU-… or MIG-…)."
            )
        return uuids
    raise InvalidSpec(f"ServerSpec.gpus is {value!r}: give a count or a list of GPU UUIDs.")


def engine_args(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidSpec(f"ServerSpec.engine_args is {type_of(value)}: give a dict.")
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
        f"{where} is {type_of(value)}: give a text, number, True, False, None, a list of texts "
        "and numbers, or a dict."
    )


def env(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidSpec(f"ServerSpec.env is {type_of(value)}: give a dict.")
    for name, item in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InvalidSpec(f"ServerSpec.env has the name {name!r}: it is no name of a variable.")
        if name in OWNED_ENV:
            raise InvalidSpec(f"ServerSpec.env sets {name}: {OWNED_ENV[name]}.")
        if not isinstance(item, str) or "\0" in item:
            raise InvalidSpec(f"ServerSpec.env[{name!r}] is {type_of(item)}: give a text.")
    return dict(value)


def command(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as exc:
        raise InvalidSpec(f"ServerSpec.command {value!r} is no command line: {exc}.") from None
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


def lora_modules(value: Any) -> dict[str, str] | None:
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
