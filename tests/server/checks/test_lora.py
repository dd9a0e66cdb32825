"""Adapters: the rank a server needs, and adapters that vLLM refuses after loading the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.exceptions import InvalidSpec
from airflow_provider_vllm.server.checks import lora
from airflow_provider_vllm.server.checks.finding import Finding
from airflow_provider_vllm.server.checks.options import Options
from tests.fakes.model_files import LLAMA, write_adapter


def found(*folders: Path | str, base: Any = LLAMA, **args: Any) -> list[Finding]:
    modules = {f"adapter-{number}": str(folder) for number, folder in enumerate(folders)}
    return list(lora.findings(modules, Options.of(args), base))


def test_the_rank_is_the_smallest_offered_that_holds_all(tmp_path: Path) -> None:
    ranks: dict[str, dict[str, Any]] = {
        "a": {"r": 4},
        "b": {"r": 8, "rank_pattern": {"q_proj": 20}},
        "c": {"r": 200},
    }
    paths = {name: str(write_adapter(tmp_path / name, **config)) for name, config in ranks.items()}
    assert lora.needed_rank({"a": paths["a"]}) == 8
    assert lora.needed_rank({"a": paths["a"], "b": paths["b"]}) == 32
    assert lora.needed_rank(paths) == 256
    assert lora.needed_rank(None) is None
    assert lora.needed_rank({"hub": "org/adapter"}) is None
    with pytest.raises(InvalidSpec, match="rank 600, and vLLM takes at most 512"):
        lora.needed_rank({"d": str(write_adapter(tmp_path / "d", r=600))})


def test_a_config_without_a_rank_is_named(tmp_path: Path) -> None:
    for number, text in enumerate(("{", "[]", '{"r": 0}', '{"r": "8"}')):
        folder = write_adapter(tmp_path / str(number))
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(InvalidSpec, match=f"{folder}/adapter_config.json"):
            lora.needed_rank({"a": str(folder)})
        assert "adapter_config.json" in found(folder)[0].message


def test_good_adapters_and_hub_ids_give_nothing(tmp_path: Path) -> None:
    assert found(write_adapter(tmp_path / "a"), "org/adapter", max_lora_rank=8) == []
    assert found(write_adapter(tmp_path / "b", modules_to_save=["score"])) == []
    assert found(write_adapter(tmp_path / "c", init_lora_weights="gaussian"), base=None) == []
    assert list(lora.findings(None, Options.of({}), None)) == []


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["score", "embed_tokens"]}, r"modules_to_save=['embed_tokens']"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
    ],
)
def test_what_vllm_refuses(tmp_path: Path, config: dict, why: str) -> None:
    (finding,) = found(write_adapter(tmp_path / "a", **config))
    assert (finding.check, finding.level) == ("lora", "error")
    assert f"Adapter 'adapter-0': vLLM does not support {why}" in finding.message


def test_a_rank_above_the_limit_says_which_limit_would_do(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", r=40)
    (finding,) = found(folder, max_lora_rank=16)
    assert "rank is 40, max_lora_rank 16" in finding.message
    assert finding.fix == "Set `max_lora_rank=64`."
    assert "at most 512" in found(write_adapter(tmp_path / "b", r=513))[0].message


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    assert "does not exist" in found(tmp_path / "none")[0].message
    folder = write_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"")
    assert f"{weights} has 0 bytes" in found(folder)[0].message
    weights.unlink()
    assert "has no weights" in found(folder)[0].message
    (folder / "adapter_model.bin").touch()
    assert found(folder) == []


def test_an_adapter_of_another_base_model(tmp_path: Path) -> None:
    (finding,) = found(write_adapter(tmp_path / "a", hidden_size=3584))
    assert "hidden_size 3584, the base model has 4096" in finding.message
