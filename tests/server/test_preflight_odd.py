"""Odd and damaged models and adapters: no check fails on one, and none takes long."""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.server import preflight
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.preflight import Finding
from tests.fakes.model_files import LLAMA, write_adapter, write_model
from tests.server.test_preflight import Worker, gpu, ids

ODD_JSON = (
    b"", b"null", b"0", b"[]", b'"text"', b"{", b"\xff\xfe{}", b"[" * 200_000, b"{}" * 9,
    b'{"a": ' * 100_000, b"NaN", b"-1e999", b"9" * 5000, b"\0" * 100,
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e300, float("inf"), float("nan"), 10**30, "", "8", [], [[]], [1, "a"], {}, {"a": None},
)  # fmt: skip
CONFIG_FIELDS = (
    *LLAMA, "text_config", "llm_config", "quantization_config", "tie_word_embeddings", "head_dim",
    "layer_types", "sliding_window",
)  # fmt: skip
ADAPTER_FIELDS = (
    "r", "rank_pattern", "modules_to_save", "bias", "init_lora_weights", "use_dora", "target_modules",
)  # fmt: skip


class Odd:
    """A worker that looks at one odd folder after the other; none may make a check fail or take long."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        self.worker, self.folder, self.number = worker, folder, 0
        worker.check(folder / "first", gpu())  # asks the interpreter, whose answer is kept

    def look(self, make: Callable[[Path, Path], Any], what: str) -> list[Finding]:
        self.number += 1
        model = write_model(self.folder / f"{self.number}-model")
        adapter = write_adapter(self.folder / f"{self.number}-adapter")
        make(model, adapter)
        begin = time.monotonic()
        found = [
            each
            for gpus in ((gpu(),), ())
            for each in self.worker.check(model, *gpus, lora_modules={"a": str(adapter)})
        ]
        assert time.monotonic() - begin < 2, what
        return found


Make = Callable[[Path, Path], Any]


def in_model(name: str, **fields: Any) -> Make:
    return lambda model, _: sets(model / name, fields)


def in_adapter(**fields: Any) -> Make:
    return lambda _, adapter: sets(adapter / "adapter_config.json", fields)


def sets(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def odd(worker: Worker, tmp_path: Path) -> Odd:
    return Odd(worker, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ODD_JSON, ids=lambda content: str(content[:12]))
def test_an_odd_json_of_a_model_is_an_error_that_names_it(
    odd: Odd, name: str, content: bytes
) -> None:
    found = odd.look(lambda model, _: (model / name).write_bytes(content), name)
    assert any(each.level == "error" and name in each.message for each in found)


@pytest.mark.parametrize("content", ODD_JSON, ids=lambda content: str(content[:12]))
def test_an_odd_adapter_config_is_an_error_that_names_it(odd: Odd, content: bytes) -> None:
    name = "adapter_config.json"
    found = odd.look(lambda _, adapter: (adapter / name).write_bytes(content), name)
    assert any(each.level == "error" and name in each.message for each in found)


def test_odd_values_in_the_right_places(odd: Odd) -> None:
    """Whatever is found in them, no check fails: what it can't use it says, or leaves to vLLM."""
    for value in ODD_VALUES:
        for field in CONFIG_FIELDS:
            odd.look(in_model("config.json", **{field: value}), f"{field}={value}")
        for field in ADAPTER_FIELDS:
            odd.look(in_adapter(**{field: value}), f"{field}={value}")
        for weight_map in (value, {"a": value}, {"a\0": "../.."}):
            make = in_model("model.safetensors.index.json", weight_map=weight_map)
            odd.look(make, f"weight_map={weight_map}")
        text = json.dumps(value)
        odd.look(partial(write, "generation_config.json", text), f"generation_config: {text}")


def write(name: str, text: str, model: Path, _: Path) -> None:
    (model / name).write_text(text)


def headers() -> Iterator[bytes]:
    """Beginnings of weight files that are none."""
    rng = random.Random(7)
    yield from (b"", b"\0", b"\xff" * 8, b"\xff" * 64, struct.pack("<Q", 2**63) + b"{}")
    for content in ODD_JSON:
        yield struct.pack("<Q", len(content)) + content
    for value in ODD_VALUES:
        entries: list[Any] = [
            value,
            {"dtype": value, "shape": [1], "data_offsets": [0, 2]},
            {"dtype": "BF16", "shape": value, "data_offsets": [0, 2]},
            {"dtype": "BF16", "shape": [value], "data_offsets": [0, 2]},
            {"dtype": "BF16", "shape": [1], "data_offsets": value},
            {"dtype": "BF16", "shape": [1], "data_offsets": [0, value]},
        ]
        for entry in entries:
            text = json.dumps({"lm_head.weight": entry}).encode()
            yield struct.pack("<Q", len(text)) + text + b"\0\0"
    for _ in range(40):
        yield rng.randbytes(rng.randrange(200))


def test_garbage_in_place_of_weights(odd: Odd) -> None:
    for content in headers():
        for name in ("model-00001-of-00002.safetensors", "adapter_model.safetensors"):

            def make(
                model: Path, adapter: Path, name: str = name, content: bytes = content
            ) -> None:
                folder = adapter if name.startswith("adapter") else model
                (folder / name).write_bytes(content)

            found = odd.look(make, f"{name}: {content[:60]!r}")
            assert found, content[:60]
            assert not any("something odd" in each.message for each in found), content[:60]


def test_a_header_that_is_too_long_to_look_into(odd: Odd) -> None:
    def make(model: Path, _: Path) -> None:
        with (model / "model-00001-of-00002.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", 90_000_000))
            file.truncate(100_000_000)

    found = odd.look(make, "a header of 90 MB")
    assert any("90000000 bytes, too long" in each.message for each in found)


def test_files_that_are_none(odd: Odd) -> None:
    names = ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")

    def other(kind: str) -> Callable[[Path], None]:
        return {
            "loop": lambda path: path.symlink_to(path),
            "nowhere": lambda path: path.symlink_to("/no/such/file"),
            "folder": lambda path: path.mkdir(),
            "pipe": lambda path: os.mkfifo(path),
            "device": lambda path: path.symlink_to("/dev/zero"),
        }[kind]

    for kind in ("loop", "nowhere", "folder", "pipe", "device"):
        for name in (*names, "adapter_config.json", "adapter_model.safetensors"):

            def make(model: Path, adapter: Path, name: str = name, kind: str = kind) -> None:
                path = (adapter if name.startswith("adapter") else model) / name
                path.unlink()
                other(kind)(path)

            found = odd.look(make, f"{name} is a {kind}")
            assert any(each.level == "error" for each in found) or name == names[1], (name, kind)


def test_a_model_that_is_no_folder(worker: Worker, tmp_path: Path) -> None:
    (loop := tmp_path / "loop").symlink_to(loop)
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (loop, pipe, Path("/dev/zero"), tmp_path / ("x" * 300)):
        (finding,) = worker.check(path, gpu())
        assert (finding.check, finding.level) == ("model-path", "error")
        assert str(path) in finding.message
    worker.check("y" * 300, gpu())  # for vLLM a name on the hub


def test_a_model_that_this_user_may_not_read(worker: Worker, model: Path) -> None:
    """Root may read everything: then it is looked at as another user."""
    model.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        user = os.geteuid()
        found, findings = preflight.model.look_up(str(model), Options({}), {})
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        model.chmod(0o700)
    assert found is None
    assert f"cannot be read by user {user}" in findings[0].message


def test_a_check_that_fails_itself_is_a_warning_that_names_it(
    worker: Worker, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such thing")

    for module, name, check in (
        (preflight.gpu_locks, "locked", "gpus"),
        (preflight.model, "look_up", "model"),
        (preflight.model, "read_weights", "weights"),
        (preflight.lora, "findings", "lora"),
        (preflight.memory, "gpu_findings", "memory"),
        (preflight.host, "shm_findings", "shm"),
        (preflight.host, "limit_findings", "limits"),
        (preflight.host, "port_findings", "port"),
        (preflight.host, "state_root_findings", "state-root"),
        (preflight.interpreter, "findings", "interpreter"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            found = worker.check(model, gpu(), lora_modules={"a": "/no/adapter"})
        odd = [each for each in found if "RuntimeError: no such thing" in each.message]
        assert ids(odd) == [(check, "warning")]
