"""max_model_len against what the model's own config.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.server.checks import context, memory
from airflow_provider_vllm.server.checks.model import Model
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.sizes import GIB
from tests.fakes.model_files import LLAMA

LONG = {"max_model_len": 131072}


def model(**config: Any) -> Model:
    return Model(Path("/m"), False, {**LLAMA, "max_position_embeddings": 8192, **config})


def checks(model: Model, args: dict, environ: dict | None = None) -> list[str]:
    return [f.fix for f in context.findings(model, Options.of(args), environ or {})]


def test_more_than_the_model_takes() -> None:
    fix = ["Set `max_model_len` to 8192 or less."]
    assert checks(model(), LONG) == fix
    assert checks(model(rope_scaling={"rope_type": "llama3", "factor": 8.0}), LONG) == fix
    assert checks(model(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), LONG) == fix
    assert checks(model(), {"max-model-len": "8k"}) == []


@pytest.mark.parametrize(
    ("config", "args", "environ"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, {}),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {}, {}),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, {}, {}),
        ({"model_max_length": 131072}, {}, {}),
        ({"model_type": "some_new_one"}, {}, {}),
        ({"max_position_embeddings": None}, {}, {}),
        ({}, {"hf_overrides": {"max_position_embeddings": 131072}}, {}),
        ({}, {"config_format": "mistral"}, {}),
        ({}, {"max_model_len": "auto"}, {}),
        ({}, {}, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}),
    ],
)
def test_silent_where_the_limit_is_not_certain(config: dict, args: dict, environ: dict) -> None:
    assert checks(model(**config), {**LONG, **args}, environ) == []


def test_no_advice_above_the_models_own_limit() -> None:
    """8192 tokens of this model take 1 GiB: with 6 GiB the cache is not what is too small."""

    def cpu(space: str) -> list[str]:
        environ = {"VLLM_CPU_KVCACHE_SPACE": space}
        args = Options.of(LONG)
        return [f.fix for f in memory.cpu_findings(model(), args, environ, 64 * GIB, 64 * GIB)]

    assert cpu("6") == []
    (short,) = memory._context_findings(model(), Options.of(LONG), GIB // 2, "")
    assert "8192 tokens" in short.message
    assert short.fix.startswith("Set `max_model_len` to 4096 or less")
