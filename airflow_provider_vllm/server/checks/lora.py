"""LoRA adapters: the rank that a server needs, and adapters that vLLM will refuse.

vLLM looks at adapters only after the base model's weights are loaded, so that a wrong one costs the
whole load. The features it refuses are those of vllm/lora/peft_helper.py (0.32).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from airflow_provider_vllm.exceptions import InvalidSpec
from airflow_provider_vllm.server.checks import safetensors
from airflow_provider_vllm.server.checks.finding import Finding, error
from airflow_provider_vllm.server.checks.model import read_json
from airflow_provider_vllm.server.checks.options import Options

# The values of --max-lora-rank (vllm/config/lora.py, 0.32; older ones have fewer).
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_REFUSED = ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication")


def is_local(path: str) -> bool:
    """Whether vLLM takes this for a folder rather than for a hub id."""
    return path.startswith(("/", "./", "../", "~")) or Path(path).is_dir()


def read_config(folder: str) -> dict[str, Any]:
    """An adapter's adapter_config.json. Raises InvalidSpec, naming the file."""
    path = Path(folder).expanduser() / "adapter_config.json"
    try:
        config = read_json(path, 1_000_000)
    except OSError as exc:
        raise InvalidSpec(f"{path} cannot be read: {exc.strerror}") from None
    except ValueError as exc:
        raise InvalidSpec(f"{path} can't be used: {exc}") from None
    if not isinstance(config, dict) or type(config.get("r")) is not int or config["r"] < 1:
        raise InvalidSpec(f"{path} has no rank: the field r has to be a positive integer")
    for name, kind in (("rank_pattern", dict), ("modules_to_save", list)):
        if not isinstance(config.get(name) or kind(), kind):
            raise InvalidSpec(f"{path}: the field {name} has to be a {kind.__name__}")
    return config


def rank_of(config: Mapping[str, Any]) -> int:
    """The highest rank of an adapter, its per-module ranks included."""
    per_module = (config.get("rank_pattern") or {}).values()
    return max([config["r"], *(rank for rank in per_module if isinstance(rank, int))])


def needed_rank(modules: Mapping[str, str] | None) -> int | None:
    """What `--max-lora-rank` has to be for these adapters (name -> folder): the smallest value that
    vLLM offers and that holds them all. None where no local adapter says its rank.

    Raises InvalidSpec where an adapter_config.json cannot be read or needs more than vLLM offers.
    """
    ranks = [rank_of(read_config(path)) for path in (modules or {}).values() if is_local(path)]
    if not ranks:
        return None
    for offered in RANKS:
        if offered >= max(ranks):
            return offered
    raise InvalidSpec(f"an adapter has rank {max(ranks)}, and vLLM takes at most {RANKS[-1]}")


def findings(
    modules: Mapping[str, str] | None, options: Options, config: Mapping[str, Any] | None
) -> Iterator[Finding]:
    """What is wrong with the adapters; `config` is the base model's config.json, where known."""
    for name, path in (modules or {}).items():
        if is_local(path):
            for message, fix in _faults(Path(path).expanduser(), options, config):
                yield error("lora", f"Adapter {name!r}: {message}.", fix)


def _faults(
    folder: Path, options: Options, base: Mapping[str, Any] | None
) -> Iterator[tuple[str, str]]:
    other = "Give `lora_modules` another adapter."
    if not folder.is_dir():
        yield f"{folder} does not exist on this worker", "Correct its path in `lora_modules`."
        return
    try:
        config = read_config(str(folder))
    except InvalidSpec as exc:
        yield str(exc), other
        return
    yield from _rank_faults(rank_of(config), options)
    yield from ((text, other) for text in _refused_features(config))
    weights = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    if not weights:
        yield f"{folder} has no weights (none of {', '.join(_WEIGHTS)})", other
    elif weights[0].suffix == ".safetensors":
        yield from ((text, other) for text in _weight_faults(weights[0], base))


def _rank_faults(rank: int, options: Options) -> Iterator[tuple[str, str]]:
    limit = options.size("max_lora_rank")
    if rank > RANKS[-1]:
        yield (
            f"its rank is {rank}, and vLLM takes at most {RANKS[-1]}",
            "Train it with a lower rank.",
        )
    elif limit is not None and rank > limit:
        fitting = next(offered for offered in RANKS if offered >= rank)
        yield f"its rank is {rank}, max_lora_rank {limit}", f"Set `max_lora_rank={fitting}`."


def _refused_features(config: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"vLLM does not support {name}" for name in _REFUSED if config.get(name))
    if config.get("bias", "none") != "none":
        yield f"vLLM does not support bias={config['bias']!r}"
    saved = [m for m in config.get("modules_to_save") or () if m not in ("classifier", "score")]
    if saved:
        yield f"vLLM does not support modules_to_save={saved}"
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        yield f"vLLM does not support init_lora_weights={init!r}"


def _weight_faults(path: Path, base: Mapping[str, Any] | None) -> Iterator[str]:
    try:
        tensors = safetensors.read_header(path)
    except safetensors.Damaged as exc:
        yield f"{path} {exc}"
        return
    except safetensors.TooLong:
        return
    except OSError as exc:
        yield f"{path} cannot be read: {exc.strerror}"
        return
    hidden = (base or {}).get("hidden_size")
    for name, tensor in tensors.items():
        if name.endswith("q_proj.lora_A.weight") and isinstance(hidden, int):
            own = tensor.shape[-1] if tensor.shape else 0
            if own != hidden:
                yield (
                    f"it was trained for a model with hidden_size {own}, the base "
                    f"model has {hidden}"
                )
            return
