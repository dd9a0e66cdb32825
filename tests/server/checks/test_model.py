"""Model folders: found, read, and whole or not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from airflow_provider_vllm.server.checks import model, safetensors
from airflow_provider_vllm.server.checks.finding import Finding
from airflow_provider_vllm.server.checks.options import Options
from tests.fakes.model_files import as_hub_cache, write_model, write_safetensors

FOREVER = float("inf")
NONE = Options.of({})


def look(
    name: str | Path, options: Options = NONE, **environ: str
) -> tuple[model.Model | None, list[Finding]]:
    """Both steps, as preflight takes them."""
    found, findings = model.look_up(str(name), options, environ)
    if found is None or findings:
        return found, findings
    offline = model.is_offline(environ)
    return model.read_weights(found, options, offline=offline, deadline=FOREVER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", shards=3)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    assert finding.fix
    return finding


def test_a_whole_model_gives_its_config_and_tensors(folder: Path) -> None:
    found, findings = look(folder)
    assert findings == []
    assert found
    assert found.config
    assert found.config["model_type"] == "llama"
    assert len(found.tensors) == 3
    assert not found.from_hub


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "~/none"):
        finding = only(look(name)[1])
        assert (finding.check, finding.level) == ("model-path", "error")
        assert "does not exist on this worker" in finding.message


def test_a_tilde_is_not_expanded_by_anyone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    finding = only(look("~/model")[1])
    assert finding.fix == f"Set `model='{folder}'`."


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "gpt2", "s3://bucket/model"])
def test_what_is_not_here_yet_gives_nothing(name: str, tmp_path: Path) -> None:
    assert look(name, HF_HOME=str(tmp_path)) == (None, [])


def test_a_gguf_file_is_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert look(tmp_path / "m.gguf") == (None, [])
    assert look(tmp_path)[1] == []


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "is missing"), ("{", "is not JSON"), ("[]", "it holds no object")],
)
def test_a_config_that_cannot_be_read(folder: Path, content: str | None, why: str) -> None:
    path = folder / "config.json"
    path.unlink() if content is None else path.write_text(content)
    finding = only(look(folder)[1])
    assert finding.check == "model-config"
    assert str(path) in finding.message
    assert why in finding.message


def test_mistrals_own_format_needs_no_config_json(folder: Path) -> None:
    (folder / "config.json").rename(folder / "params.json")
    assert look(folder)[1] == []


def test_missing_shards_are_counted_and_named(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()
    finding = only(look(folder)[1])
    assert "1 of 3 weight files" in finding.message
    assert "model-00002-of-00003.safetensors" in finding.message


def test_a_folder_without_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    assert "has no weights" in only(look(folder)[1]).message
    (folder / "pytorch_model.bin").write_bytes(b"x" * 100)
    found, findings = look(folder)
    assert findings == []
    assert found
    assert found.other_bytes == 100


def test_weights_that_vllm_does_not_read_are_not_looked_at(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert look(folder, Options.of({"load-format": "dummy"}))[1] == []


def test_a_file_cut_short_is_told_with_both_sizes(folder: Path) -> None:
    path = folder / "model-00003-of-00003.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    finding = only(look(folder)[1])
    assert f"{path} has {size - 1} bytes, its header says {size}" in finding.message


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has 0 bytes: it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>Sign in", "or is no header"),
        (b"\x05\0\0\0\0\0\0\0hello", "has a header that cannot be read"),
        (b"\x02\0\0\0\0\0\0\0[]", "has a header that cannot be read"),
        (b'\x0f\0\0\0\0\0\0\0{"a":{"b":"c"}}', "has a header that cannot be read"),
    ],
)
def test_a_file_that_is_no_safetensors(folder: Path, content: bytes, why: str) -> None:
    path = folder / "model-00001-of-00003.safetensors"
    path.write_bytes(content)
    finding = only(look(folder)[1])
    assert why in finding.message
    if "LFS" in why:
        assert "git lfs pull" in finding.fix


def test_every_damaged_file_is_named_at_once(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")
    assert len(look(folder)[1]) == 3


def test_tensors_of_the_index_that_are_in_no_file(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    assert "1 of 4 tensors of the index" in only(look(folder)[1]).message
    path.write_text("{}")
    assert "cannot be read as an index" in only(look(folder)[1]).message


def test_a_file_that_the_index_does_not_list_is_not_read(folder: Path) -> None:
    (folder / "leftover.safetensors").write_bytes(b"")
    assert look(folder)[1] == []


def test_consolidated_files_are_read_instead_of_the_others(folder: Path) -> None:
    write_safetensors(folder / "consolidated.safetensors", {"a": ("BF16", (4,))})
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"")
    found, findings = look(folder)
    assert findings == []
    assert found
    assert list(found.tensors) == ["a"]


def test_a_hub_model_is_checked_in_the_cache(folder: Path, tmp_path: Path) -> None:
    snapshot = as_hub_cache(folder, "org/name", tmp_path / "hf" / "hub")
    found, findings = look("org/name", HF_HOME=str(tmp_path / "hf"))
    assert findings == []
    assert found
    assert (found.folder, found.from_hub) == (snapshot, True)
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    assert look("org/name", HF_HOME=str(tmp_path / "hf"))[1] == []  # vLLM fetches it
    finding = only(look("org/name", HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")[1])
    assert finding.check == "weights"
    (snapshot / "model-00001-of-00003.safetensors").write_bytes(b"")
    # What is there but damaged is never fetched again.
    (snapshot / "model.safetensors.index.json").unlink()
    assert "is fetched again" in look("org/name", HF_HOME=str(tmp_path / "hf"))[1][0].fix


def test_offline_and_not_in_the_cache(tmp_path: Path) -> None:
    finding = only(look("org/name", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")[1])
    assert finding.check == "model-cache"
    assert str(tmp_path / "hub") in finding.message


@pytest.mark.parametrize(
    ("args", "environ", "expected"),
    [
        ({}, {"HOME": "/h"}, "/h/.cache/huggingface/hub"),
        ({}, {"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, {"HOME": "/h", "HF_HOME": "/hf"}, "/hf/hub"),
        ({}, {"HF_HOME": "/hf", "HF_HUB_CACHE": "/c"}, "/c"),
        ({"download-dir": "/d"}, {"HF_HUB_CACHE": "/c"}, "/d"),
        ({}, {"HOME": "/h", "HF_HUB_CACHE": "~/c"}, "/h/c"),
    ],
)
def test_where_the_hub_cache_is(args: dict, environ: dict, expected: str) -> None:
    assert model.hub_cache(Options.of(args), environ) == Path(expected)


def test_a_slow_disk_gives_a_warning_and_no_tensors(folder: Path) -> None:
    found, _ = model.look_up(str(folder), NONE, {})
    assert found
    clock = iter([0.0, 1.0, 2.0])
    slow, findings = model.read_weights(
        found, NONE, offline=False, deadline=1.5, now=lambda: next(clock)
    )
    finding = only(findings)
    assert finding.level == "warning"
    assert "Only 2 of 3 weight files" in finding.message
    assert slow.tensors == {}


def test_a_model_of_many_files_is_read_in_time(tmp_path: Path) -> None:
    """As many files and tensors as the largest open models have (163 files, 91,000 tensors)."""
    for number in range(163):
        tensors = {
            f"model.layers.{number}.experts.{i}.weight": ("BF16", (8, 8)) for i in range(560)
        }
        write_safetensors(tmp_path / f"model-{number:05}.safetensors", tensors)
    (tmp_path / "config.json").write_text("{}")
    begin = time.process_time()  # others on this machine do not count
    found, findings = look(tmp_path)
    took = time.process_time() - begin
    assert findings == []
    assert found
    assert len(found.tensors) == 163 * 560
    assert took < 1.5


def test_our_writer_and_reader_agree_with_a_real_file(tiny_model: Path) -> None:
    tensors = safetensors.read_header(tiny_model / "model.safetensors")
    assert sum(tensor.size for tensor in tensors.values()) > 0
    assert look(tiny_model)[1] == []
