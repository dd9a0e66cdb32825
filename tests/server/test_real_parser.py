"""vLLM's own parser: no engine argument that a ServerSpec takes sets an option that the provider owns."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.environment import allowed
from airflow_provider_vllm.exceptions import InvalidSpec
from airflow_provider_vllm.fields import OWNED_ARGS
from airflow_provider_vllm.spec import ServerSpec

pytestmark = pytest.mark.vllm

# Runs in vLLM's interpreter: command lines in, the owned options that each has changed out.
PARSE = """
import contextlib, io, json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # before 0.32
    from vllm.entrypoints.openai.cli_args import make_arg_parser
owned, lines = json.loads(sys.stdin.read())
parser = make_arg_parser(FlexibleArgumentParser())
names = {each: [] for each in owned}
for action in parser._actions:
    if action.dest in names:
        names[action.dest] += action.option_strings
def values(words):
    with contextlib.redirect_stderr(io.StringIO()):
        found = vars(parser.parse_args(["--model=m", *words]))
    return {name: found.get(name) for name in owned}
usual, changed = values([]), []
for words in lines:
    try:
        found = values(words)
    except (SystemExit, Exception):
        continue  # vLLM would not start
    changed += [[words, name] for name in owned if found[name] != usual[name]]
print(json.dumps([names, changed]))
"""
VALUES: tuple[Any, ...] = ("x", ["a", "b"])


def spellings(owned: str) -> Iterator[str]:
    """Ways to write an option, right and wrong."""
    words = owned.split("_")
    camel = words[0] + "".join(word.title() for word in words[1:])
    for name in (owned, owned.replace("_", "-"), camel, "".join(words), "_".join(reversed(words))):
        yield from (
            name,
            name.upper(),
            name.title(),
            f"no_{name}",
            f"no-{name}",
            f"{name}-",
            f"{name}_",
        )
        yield from (
            f"{name}.x",
            f"{name}..",
            f"x.{name}",
            name.replace("_", "__"),
            name.replace("_", "."),
        )
        yield from (name[:end] for end in range(1, len(name)))


def accepted() -> Iterator[list[str]]:
    for owned in OWNED_ARGS:
        for name in dict.fromkeys(spellings(owned)):
            for value in VALUES:
                try:
                    yield ServerSpec("m", engine_args={name: value}).engine_argv()
                except InvalidSpec:
                    continue
    # Values that would be options if they were words of their own.
    for value in ("--host=x", "x --api-key y", "--config", "@/etc/passwd"):
        yield ServerSpec("m", engine_args={"tokenizer": value}).engine_argv()
    for items in (["a", "host=x"], ["a", "@/etc/passwd"]):
        yield ServerSpec("m", engine_args={"allowed_local_media_path": items}).engine_argv()
    yield ServerSpec(
        "m", engine_args={"additional_config": {"api_key": "x", "host": "y"}}
    ).engine_argv()


def test_no_spelling_reaches_an_owned_option(vllm_python: Path) -> None:
    lines = list(accepted())
    assert len(lines) > 1000
    owned = sorted(set(OWNED_ARGS) - {"model"})
    environ = allowed(os.environ)
    done = subprocess.run(
        [str(vllm_python), "-c", PARSE],
        input=json.dumps([owned, lines]),
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    names, changed = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert changed == []
    assert {"--api-key", "--host", "--port"} <= {each for found in names.values() for each in found}
    for option in (each for found in names.values() for each in found if each.startswith("--")):
        with pytest.raises(InvalidSpec, match="is set by the provider"):
            ServerSpec("m", engine_args={option[2:]: "x"})
