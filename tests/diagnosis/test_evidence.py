"""Evidence: every part is there or says why not, and no secret is in it."""

from __future__ import annotations

import gzip
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.diagnosis.evidence import (
    collect,
    mask,
    mask_command,
    mask_environ,
    write,
)

LOGS = Path(__file__).parent / "logs"
SECRET = "s3cr3t-value"


@pytest.fixture
def evidence(tmp_path: Path) -> dict[str, Any]:
    log = tmp_path / "vllm.log"
    log.write_bytes(gzip.decompress((LOGS / "10_safetensors_truncated.log.gz").read_bytes()))
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "dtype": "bfloat16",
                "quantization_config": {"quant_method": "awq"},
            }
        )
    )
    return collect(
        command=["vllm", "serve", "m", "--api-key", SECRET, "--max-num-batched-tokens", "2048"],
        environ={
            "VLLM_API_KEY": SECRET,
            "HF_TOKEN": SECRET,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "AIRFLOW__CORE__FERNET_KEY": SECRET,
            "HOME": str(tmp_path),
        },
        log_path=log,
        python=sys.executable,
        model=str(tmp_path),
        exit_status=1,
        gpus=lambda: {"gpus": [], "problems": ["no driver"]},
    )


def test_every_part_is_there(evidence: dict[str, Any]) -> None:
    assert set(evidence) == {
        "collected_at",
        "launch",
        "environment",
        "versions",
        "model",
        "gpus",
        "disks",
        "memory",
        "limits",
        "kernel_log",
        "first_tracebacks",
        "request_in_flight",
        "ray",
    }
    assert evidence["versions"]["python"] == sys.version.split()[0]
    assert evidence["model"]["quantization"] == "awq"
    assert evidence["disks"]["/dev/shm"]["total"] > 0
    assert evidence["memory"]["MemTotal"] > 0
    assert evidence["gpus"]["problems"] == ["no driver"]
    assert len(evidence["limits"]["RLIMIT_NOFILE"]) == 2
    assert "wrote no scheduler step" in evidence["request_in_flight"]["missing"]
    assert "missing" in evidence["ray"]
    processes = [trace["process"] for trace in evidence["first_tracebacks"]]
    assert processes == ["Worker", "EngineCore", "APIServer"]
    assert "SafetensorError" in evidence["first_tracebacks"][0]["exception"]


def test_no_secret_and_nothing_of_airflow_is_in_it(evidence: dict[str, Any]) -> None:
    text = json.dumps(evidence)
    assert SECRET not in text
    assert "AIRFLOW__" not in text
    assert evidence["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert evidence["launch"]["command"][-2:] == ["--max-num-batched-tokens", "2048"]


def test_missing_parts_say_why() -> None:
    evidence = collect(log_path="/no/such/log", python="/no/such/python", model="/no/such/model")
    for name in ("versions", "first_tracebacks", "request_in_flight"):
        assert "No such file" in evidence[name]["missing"]
    assert "missing" in collect()["model"]
    assert "missing" in collect()["gpus"]


def test_it_is_written_for_its_owner_only(tmp_path: Path, evidence: dict[str, Any]) -> None:
    path = write(tmp_path / "evidence", evidence)
    assert json.loads(path.read_text())["launch"]["exit_status"] == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["evidence.json"]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("--api-key=abc --port 1", "--api-key=*** --port 1"),
        ("--hf-token hf_abcdefghij", "--hf-token ***"),
        ("--tokenizer /m --max-num-batched-tokens 8", "--tokenizer /m --max-num-batched-tokens 8"),
        ("http://user:pass@proxy:3128/", "http://***proxy:3128/"),
        ("Authorization: Bearer abcdef", "Authorization: Bearer ***"),
        ("used token hf_abcdefghij here", "used token *** here"),
    ],
)
def test_masking(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_masking_of_commands_and_variables() -> None:
    assert mask_command(["vllm", "--hf-token", "x", "--tokenizer", "t"]) == [
        "vllm",
        "--hf-token",
        "***",
        "--tokenizer",
        "t",
    ]
    shown = mask_environ(
        {"HF_TOKEN": "x", "HF_HOME": "/h", "SECRET": "y", "CUDA_VISIBLE_DEVICES": "0"}
    )
    assert shown == {"HF_TOKEN": "***", "HF_HOME": "/h", "CUDA_VISIBLE_DEVICES": "0"}
