"""Model and adapter folders for tests: real headers, and holes in place of weights.

A safetensors file written here has the size its header says, as a sparse file: a model of 70
billion parameters takes a few KB of disk.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "F8_E4M3": 1}

# Llama 3.1 8B as its config.json says: 128 KiB of KV cache a token at 16 bits.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A file of tensors, name -> (dtype, shape), all zero."""
    start, size = _start_and_size(tensors)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)


def safetensors_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The content of such a file."""
    start, size = _start_and_size(tensors)
    return start.ljust(size, b"\0")


def _start_and_size(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * _WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + end


def write_model(
    folder: Path,
    *,
    parameters: int = 1_000_000,
    shards: int = 2,
    dtype: str = "BF16",
    config: Mapping[str, Any] = LLAMA,
) -> Path:
    """A model folder whose `parameters` are spread evenly over `shards` files and an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        tensor = f"model.layers.{number}.mlp.weight"
        write_safetensors(folder / name, {tensor: (dtype, (parameters // shards,))})
        weight_map[tensor] = name
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def write_adapter(folder: Path, *, hidden_size: int = 4096, **config: Any) -> Path:
    """A LoRA adapter of rank 8 unless `config` says otherwise."""
    folder.mkdir(parents=True)
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    write_safetensors(
        folder / "adapter_model.safetensors", {name: ("BF16", (config["r"], hidden_size))}
    )
    return folder


def as_hub_cache(folder: Path, model: str, cache: Path) -> Path:
    """Moves a model folder into a hub cache as revision main; the snapshot's folder."""
    repository = cache / f"models--{model.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0a1b2c")
    (repository / "snapshots").mkdir()
    return folder.rename(repository / "snapshots" / "0a1b2c")
