"""vLLM's engine with no server or client around it: what no client of a server can pass.

    PYTHON benchmarks/engine_alone.py '{"model": DIR, "rows": 2000, "in_flight": 64, "prompt": ..., "rounds": 5}' OUT

Writes rows/s of each round into the file OUT, as JSON lists: `chat` (template and tokenizer as a server has them), and
`tokens`, where the prompts come as token numbers, so that nothing but the engine's own work is left.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(sys.argv[1])
    llm = LLM(
        job["model"],
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=job["in_flight"],
    )
    params = SamplingParams(max_tokens=8)
    chats = [
        [{"role": "user", "content": job["prompt"].format(number)}] for number in range(job["rows"])
    ]
    tokenizer = llm.get_tokenizer()
    tokens = [
        {
            "prompt_token_ids": tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
        }
        for chat in chats
    ]

    def rate(ask: Callable[..., Any], prompts: list[Any]) -> float:
        began = time.perf_counter()
        ask(prompts, params, use_tqdm=False)
        return len(prompts) / (time.perf_counter() - began)

    rate(llm.chat, chats[:200])
    found: dict[str, list[float]] = {"chat": [], "tokens": []}
    for _ in range(job["rounds"]):
        found["chat"].append(rate(llm.chat, chats))
        found["tokens"].append(rate(llm.generate, tokens))
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
