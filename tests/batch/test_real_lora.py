"""A LoRA adapter on real vLLM, named by the batch or by a row."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch.run import run_batch
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.server.launch import LaunchOptions
from airflow_provider_vllm.server.links import OwnServer
from airflow_provider_vllm.server.processes import this_process
from airflow_provider_vllm.server.state import StateRoot
from airflow_provider_vllm.spec import ServerSpec
from tests.batch.helpers import LOG, batch_row, read_rows, write_rows

pytestmark = pytest.mark.vllm
# vLLM 0.32's CPU build answers all rows that run at once with the adapter of one of them, whoever asks.
ALONE: dict[str, Any] = {"concurrency": 1, "pack": 1}


def adapter(folder: Path, model: Path) -> Path:
    """An adapter that changes what the model says: one large random matrix for each layer's query."""
    config = json.loads((model / "config.json").read_text())
    size, rank = config["hidden_size"], 8
    chance, header, data = random.Random(0), {}, bytearray()
    for layer in range(config["num_hidden_layers"]):
        for part, shape in (("A", [rank, size]), ("B", [size, rank])):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
            numbers = [chance.uniform(-1, 1) for _ in range(rank * size)]
            begin = len(data)
            data += struct.pack(f"<{len(numbers)}f", *numbers)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    folder.mkdir()
    head = json.dumps(header).encode()
    weights = struct.pack("<Q", len(head)) + head + bytes(data)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": 64, "target_modules": ["q_proj"]}
    about |= {"bias": "none", "base_model_name_or_path": str(model), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def test_an_adapter_answers_by_its_name(
    vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    spec = ServerSpec(
        model=str(tiny_model),
        python=str(vllm_python),
        served_model_name="m",
        lora_modules={"loud": str(adapter(tmp_path / "adapter", tiny_model))},
        gpus=0,
        engine_args={"enforce_eager": True, "dtype": "float32", "max_model_len": 512},
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        start_attempts=1,
    )
    options = LaunchOptions(owner=this_process())
    link = OwnServer(spec, "lora", StateRoot(tmp_path / "state"), options, report=LOG.info)
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
    prompts = [f"Say {number}." for number in range(4)]
    models = ["m", "loud", "m", "nobody"]
    rows = [batch_row(f"id-{i}", prompts[i // 2], model=models[i], **params) for i in range(4)]
    try:
        answers = {}
        for model in (None, "loud"):
            batch = BatchSpec(prompts=prompts, model=model, params=params, **ALONE)
            folder = tmp_path / f"journal-{model}"
            answers[model] = run_batch(batch, link, journal_dir=str(folder), log=LOG).answers
        mixed = BatchSpec(
            input_path=str(write_rows(tmp_path / "in.jsonl", rows)),
            output_path=str(tmp_path / "out.jsonl"),
            max_error_rate=0.3,
            **ALONE,
        )
        run_batch(mixed, link, journal_dir=str(tmp_path / "journal"), log=LOG)
    finally:
        link.close()
    plain, loud = answers[None], answers["loud"]
    assert plain and loud and None not in plain + loud
    assert all(one != other for one, other in zip(plain, loud, strict=True))
    said = [row["response"]["body"] for row in read_rows(tmp_path / "out.jsonl")]
    assert [body["model"] for body in said] == ["m", "loud", "m"]
    texts = [body["choices"][0]["message"]["content"] for body in said]
    assert texts == [plain[0], loud[0], plain[1]]
    (error,) = read_rows(tmp_path / "out.jsonl.errors.jsonl")
    assert (error["custom_id"], error["error"]["code"]) == ("id-3", "http_404")
