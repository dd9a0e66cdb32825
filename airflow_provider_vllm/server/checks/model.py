"""The model's files on this worker: found, and whole.

What enters is a model as a ServerSpec names it; what leaves is a `Model` (its config and the
headers of its weights, where they are here) and findings. Nothing is asked of a hub: a hub id is
looked up in the hub's cache on this worker only.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_provider_vllm.server.checks import safetensors
from airflow_provider_vllm.server.checks.finding import Finding, error, warning
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.checks.safetensors import Tensor

# The values of --load-format that read the files checked here.
READ_HERE = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt")
# Decoders whose every layer keeps keys and values of every token, and nothing else.
PLAIN_DECODERS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "granite")
TRUE = ("1", "ON", "YES", "TRUE")
# Far above what models have: the largest config.json is some 100 KB, an index some MB.
_MAX_CONFIG, _MAX_INDEX = 4_000_000, 32_000_000
_COPY_AGAIN = "Copy the model again, or correct `model`."


@dataclass(frozen=True)
class Model:
    """A model's folder on this worker.

    `from_hub`: found in the hub's cache, so that vLLM fetches what is missing. `tensors` by name,
    from the safetensors files that vLLM reads; {} where they are not all known. `other_bytes`: size
    of weights in other formats.
    """

    folder: Path
    from_hub: bool
    config: Mapping[str, Any] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    other_bytes: int = 0

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the config: nested in multimodal models."""
        config = self.config or {}
        parts = (config.get("text_config"), config.get("llm_config"))
        return next((part for part in parts if part and isinstance(part, Mapping)), config)


def is_local(model: str) -> bool:
    """Whether vLLM takes `model` for a path rather than for a hub id."""
    return model.startswith(("/", "./", "../", "~")) or os.path.exists(model)


def is_hub_id(model: str) -> bool:
    """`name` or `organisation/name`; not `…:quantization` (GGUF) nor an object store."""
    return not is_local(model) and ":" not in model and model.count("/") <= 1


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether the hub's library is told to stay off the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(environ.get(name, "").upper() in TRUE for name in names)


def hub_cache(options: Options, environ: Mapping[str, str]) -> Path:
    """Where the hub's library keeps models (its own rules, huggingface_hub/constants.py)."""
    home = Path(environ.get("HOME") or Path.home())
    cache_home = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    hf_home = Path(environ.get("HF_HOME") or cache_home / "huggingface")
    cache = (
        options.get("download_dir")
        or environ.get("HF_HUB_CACHE")
        or environ.get("HUGGINGFACE_HUB_CACHE")
        or hf_home / "hub"
    )
    return home / str(cache)[2:] if str(cache).startswith("~/") else Path(cache)


def cached_snapshot(model: str, revision: str, cache: Path) -> Path | None:
    """The folder of a hub model's revision in `cache`; None where it was never fetched."""
    repository = cache / f"models--{model.replace('/', '--')}"
    try:
        commit = (repository / "refs" / revision).read_text(encoding="ascii").strip()
    except OSError:
        commit = revision
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def look_up(
    model: str, options: Options, environ: Mapping[str, str]
) -> tuple[Model | None, list[Finding]]:
    """Finds the model's folder and reads its config.json.

    (None, []) for what can only be known later: a hub model that is not here yet, a GGUF file, an
    object store.
    """
    if is_local(model):
        folder = Path(model).expanduser()
        if fault := _path_fault(folder):
            here = "" if folder.is_absolute() else f" (looked for in {Path.cwd()})"
            return None, [
                error(
                    "model-path",
                    f"{folder} {fault}{here}.",
                    "Correct `model`, or copy the model to every worker that can get this task.",
                )
            ]
        if model.startswith("~"):
            return None, [
                error(
                    "model-path",
                    f"{model!r} is not expanded: no shell reads it.",
                    f"Set `model={str(folder)!r}`.",
                )
            ]
        if folder.is_file():
            return None, []
        return _with_config(Model(folder, from_hub=False), options)
    if not is_hub_id(model):
        return None, []
    cache = hub_cache(options, environ)
    snapshot = cached_snapshot(model, str(options.get("revision", "main")), cache)
    if snapshot:
        return _with_config(Model(snapshot, from_hub=True), options)
    if is_offline(environ):
        return None, [
            error(
                "model-cache",
                f"{model} is no folder on this worker and not in the hub cache {cache}, and "
                "HF_HUB_OFFLINE keeps vLLM from fetching it.",
                "Set `model` to the full path of a local model, fetch it into this cache, or take "
                "HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) out of the environment.",
            )
        ]
    return None, []


def _path_fault(path: Path) -> str | None:
    """Why this user can't use `path`; None where he can."""
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            next(os.scandir(path), None)
    except FileNotFoundError:
        return "does not exist on this worker"
    except OSError as exc:
        return f"cannot be read by user {os.geteuid()}, who runs this: {exc.strerror}"
    return None if stat.S_ISDIR(kind) or stat.S_ISREG(kind) else "is no folder"


def read_json(path: Path, limit: int) -> Any:
    """The JSON in a file of at most `limit` bytes. Raises OSError, and ValueError saying what is wrong."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no file")
    if found.st_size > limit:
        raise ValueError(f"it has {found.st_size} bytes, more than one of {limit} can be")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _with_config(model: Model, options: Options) -> tuple[Model, list[Finding]]:
    folder = Path(options.get("hf_config_path") or model.folder)
    path = folder / "config.json"
    try:
        config = read_json(path, _MAX_CONFIG)
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
        return Model(model.folder, model.from_hub, config), []
    except FileNotFoundError:
        # Mistral's own format, or GGUF; a hub model may be half fetched.
        if model.from_hub or (folder / "params.json").exists() or any(folder.glob("*.gguf")):
            return model, []
        fault = "is missing"
    except OSError as exc:
        fault = f"cannot be read: {exc.strerror}"
    except ValueError as exc:
        fault = f"is not JSON: {exc}"
    return model, [error("model-config", f"{path} {fault}.", _COPY_AGAIN)]


def read_weights(
    model: Model,
    options: Options,
    *,
    offline: bool,
    deadline: float,
    now: Callable[[], float] = time.monotonic,
) -> tuple[Model, list[Finding]]:
    """Compares the index with the files and every safetensors header with its file.

    Returns the model with its tensors, or without them where a file is missing, damaged, or could
    not be looked at before `deadline` (monotonic seconds).
    """
    load_format = str(options.get("load_format", "auto"))
    if load_format not in READ_HERE or any(model.folder.glob("*.gguf")):
        return model, []
    files, index, found = _files(model, load_format, offline)
    if found:
        return model, found
    tensors: dict[str, Tensor] = {}
    for done, path in enumerate(files):
        if now() > deadline:
            slow = f"Only {done} of {len(files)} weight files in {model.folder} could be looked at"
            why = "in the time of this check: its disk is slow, and so will loading be."
            fix = "Set `startup_timeout` accordingly, or keep the model on a local disk."
            return model, [*found, warning("weights", f"{slow} {why}", fix)]
        try:
            tensors.update(safetensors.read_header(path))
        except safetensors.Damaged as exc:
            found.append(_damaged(path, str(exc), model))
        except safetensors.TooLong as exc:
            return model, [*found, warning("weights", str(exc), "vLLM itself will read it.")]
        except OSError as exc:
            found.append(_damaged(path, f"cannot be read: {exc.strerror}", model))
    if found:
        return model, found
    lost = sorted(set(index) - set(tensors)) if files else []
    if lost:
        count = f"{len(lost)} of {len(index)} tensors"
        message = f"{count} of the index of {model.folder} are in no file, {lost[0]} first."
        return model, [error("weights", message, _COPY_AGAIN)]
    other = 0 if files else sum(path.stat().st_size for path in _other_weights(model.folder))
    return Model(model.folder, model.from_hub, model.config, tensors, other), []


def _files(
    model: Model, load_format: str, offline: bool
) -> tuple[list[Path], Mapping[str, str], list[Finding]]:
    """The safetensors files that vLLM will read, the index (tensor -> file), what is missing."""
    folder = model.folder
    consolidated = sorted(folder.glob("consolidated*.safetensors"))
    mistral = load_format == "mistral" or (load_format == "auto" and bool(consolidated))
    files = consolidated if mistral else sorted(folder.glob("*.safetensors"))
    if load_format == "pt":
        files = []
    index_path = folder / f"{'consolidated' if mistral else 'model'}.safetensors.index.json"
    index, found = _read_index(index_path)
    listed = {folder / name for name in index.values()}
    missing = sorted(path.name for path in listed if not path.exists())
    if missing and (offline or not model.from_hub):
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        message = f"{len(missing)} of {len(listed)} weight files of {folder} are missing: {some}."
        found.append(error("weights", message, _COPY_AGAIN))
    if not files and not any(_other_weights(folder)) and not model.from_hub:
        message = f"{folder} has no weights (*.safetensors, *.bin or *.pt)."
        found.append(error("weights", message, _COPY_AGAIN))
    if missing:
        return [], {}, found
    return [path for path in files if not listed or path in listed], index, found


def _read_index(path: Path) -> tuple[Mapping[str, str], list[Finding]]:
    try:
        weight_map = read_json(path, _MAX_INDEX)["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}, []
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        return {}, [error("weights", f"{path} cannot be read as an index: {exc}.", _COPY_AGAIN)]


def _other_weights(folder: Path) -> Iterator[Path]:
    for pattern in ("*.bin", "*.pt"):
        yield from folder.glob(pattern)


def _damaged(path: Path, fault: str, model: Model) -> Finding:
    if "Git LFS" in fault:
        fix = "Run `git lfs pull` in that folder."
    elif model.from_hub:
        # The hub's library looks at names only: a damaged file of its cache stays there.
        fix = f"Remove {path.resolve()} so that it is fetched again."
    else:
        fix = _COPY_AGAIN
    return error("weights", f"{path} {fault}.", fix)
