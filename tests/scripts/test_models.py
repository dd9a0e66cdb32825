"""Models appear under their name only when they are complete, and are kept then."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from scripts.models import make
from scripts.progress import Progress


@pytest.fixture
def progress() -> Progress:
    return Progress(out=io.StringIO())


def build(target: Path) -> None:
    (target / "config.json").write_text("{}")


def test_a_complete_model_is_kept(tmp_path: Path, progress: Progress) -> None:
    make("m", build, tmp_path, progress)
    (tmp_path / "m" / "config.json").write_text('{"mine": 1}')
    make("m", build, tmp_path, progress)
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == {"mine": 1}


def test_an_interrupted_one_is_made_again(tmp_path: Path, progress: Progress) -> None:
    def interrupted(target: Path) -> None:
        build(target)
        (target / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make("m", interrupted, tmp_path, progress)
    assert not (tmp_path / "m").exists()
    make("m", build, tmp_path, progress)
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]


def test_the_models_of_the_set_up_are_what_they_say(tiny_model: Path, instruct_model: Path) -> None:
    tiny = json.loads((tiny_model / "config.json").read_text())
    assert (tiny["num_hidden_layers"], tiny["hidden_size"], tiny["vocab_size"]) == (2, 64, 512)
    instruct = json.loads((instruct_model / "config.json").read_text())
    assert (instruct["model_type"], instruct["dtype"]) == ("llama", "bfloat16")
    assert "quantization_config" not in instruct
    for model in (tiny_model, instruct_model):
        assert "assistant" in (model / "chat_template.jinja").read_text()
