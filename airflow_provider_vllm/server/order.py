"""What a supervisor is told to start, and where: written by `launch`, read by the supervisor.

The file is 0600 in a 0700 directory, since `spec.env` may hold what the worker alone should know.
"""

from __future__ import annotations

import errno
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from airflow_provider_vllm.environment import START_MARK, allowed
from airflow_provider_vllm.exceptions import InvalidSpec
from airflow_provider_vllm.server.checks.lora import needed_rank
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.interpreter import inspect
from airflow_provider_vllm.server.processes import ProcessId
from airflow_provider_vllm.server.state import GenerationDir, read_json, write_json
from airflow_provider_vllm.spec import ServerSpec

# A line for each request, our own looks included, costs the server time and buries its log.
ACCESS_LOG = "disable_uvicorn_access_log"


@dataclass(frozen=True)
class Order:
    """One start. `python` has vLLM; `owner` is the process with which the server ends until it is released;
    `task` names the Airflow task for people; `gpus` is resolved for this worker."""

    server_id: str
    generation: int
    nonce: str
    spec: ServerSpec
    python: str
    owner: ProcessId | None
    task: str | None

    def write(self, directory: GenerationDir) -> None:
        data = dict(self.__dict__)
        data["spec"] = self.spec.to_json()
        data["owner"] = self.owner.to_json() if self.owner else None
        write_json(directory.spec_file, data)

    @classmethod
    def read(cls, directory: GenerationDir) -> Order:
        data = read_json(directory.spec_file)
        if data is None:
            raise FileNotFoundError(directory.spec_file)
        data["spec"] = ServerSpec.of(data["spec"])
        data["owner"] = ProcessId.from_json(data["owner"])
        return cls(**data)

    def command(self, port: int) -> list[str]:
        """The command line of vLLM on `port`. Holds no secret."""
        spec = self.spec
        if spec.command:
            known = {"{port}": str(port), "{host}": spec.host, "{model}": spec.served_model_name}
            return [_fill(word, known) for word in spec.command]
        words = inspect(self.python).serve_command(spec.model)
        words += [
            *_name_words(spec),
            f"--host={spec.host}",
            f"--port={port}",
        ]
        if Options.of(spec.engine_args).get(ACCESS_LOG) is None:
            words.append("--" + ACCESS_LOG.replace("_", "-"))
        words += spec.engine_argv()
        return words + _lora_words(spec)

    def environ(
        self, environ: Mapping[str, str], key: str, given: Mapping[str, str]
    ) -> dict[str, str]:
        """The environment of vLLM: the allowed part of `environ`, the key, what this start is `given` (its
        GPUs, its temporary folder), the spec's own, and the mark by which what is left of it is found."""
        out = allowed(environ)
        out["PYTHONUNBUFFERED"] = "1"
        out["VLLM_API_KEY"] = key
        out.update(given)
        # vLLM's own limit for the engine (600 s by default) must not end a start that may take longer.
        out["VLLM_ENGINE_READY_TIMEOUT_S"] = str(max(600, int(self.spec.startup_timeout)))
        return {**out, **self.spec.env, START_MARK: self.nonce}


def _name_words(spec: ServerSpec) -> list[str]:
    """The name that answers carry, and the model's own: files of `vllm run-batch` and other clients ask for that."""
    name = f"--served-model-name={spec.served_model_name}"
    if spec.model == spec.served_model_name or spec.model.startswith("-"):
        return [name]
    return ["--served-model-name", spec.served_model_name, spec.model]


def _lora_words(spec: ServerSpec) -> list[str]:
    """The adapters as options of vLLM, with room for the largest rank. Raises InvalidSpec."""
    if not spec.lora_modules:
        return []
    options = Options.of(spec.engine_args)
    words = [] if options.get("enable_lora") is not None else ["--enable-lora"]
    rank = needed_rank(spec.lora_modules)
    if rank is not None and options.get("max_lora_rank") is None:
        words.append(f"--max-lora-rank={rank}")
    return [*words, "--lora-modules", *(f"{n}={p}" for n, p in spec.lora_modules.items())]


def _fill(word: str, known: Mapping[str, str]) -> str:
    for name, value in known.items():
        word = word.replace(name, value)
    return word


def free_port(host: str) -> int:
    """A port that is free on `host` right now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_taken(host: str, port: int) -> bool:
    """Whether another process listens on `host`:`port`. Raises InvalidSpec where nobody could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return True
            raise InvalidSpec(
                f"ServerSpec.host {host!r}, port {port}: this worker can't listen there "
                f"({exc.strerror or exc}). Use an address of this worker and a port from 1024 on, or port=0."
            ) from None
    return False


def url_of(host: str, port: int) -> str:
    """The URL under which others reach what listens on `host`."""
    if host in ("0.0.0.0", "::", ""):
        host = socket.getfqdn()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def new_key() -> str:
    return secrets.token_urlsafe(32)


def check_key(key: str, where: str = "The connection of ServerSpec.auth_conn_id") -> str:
    """The key itself when an HTTP header can carry it. Raises InvalidSpec, without showing it."""
    if not re.fullmatch(r"[!-~]+", key):
        raise InvalidSpec(
            f"{where}: its password is empty or has a blank, a line break or a character beyond ASCII, which no "
            "HTTP header carries. Use letters, digits and punctuation."
        )
    return key
