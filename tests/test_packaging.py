"""The package as others get it: the wheel's content, and what Airflow sees of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import airflow_provider_vllm
from scripts.set_up import ROOT

PACKAGE = "airflow_provider_vllm"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as a release would be."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    done = subprocess.run(
        [*command, "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = airflow_provider_vllm.__version__
    assert {name.split("/")[0] for name in names} == {PACKAGE, f"{PACKAGE}-{version}.dist-info"}
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith(f"{PACKAGE}/")} == in_tree
    assert f"{PACKAGE}/py.typed" in names


def test_wheel_has_licence_entry_point_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"{PACKAGE}-{airflow_provider_vllm.__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert metadata["Name"] == "airflow-provider-vllm"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) >= {"vllm", "test"}
    assert "[apache_airflow_provider]" in entry_points
    assert f"{PACKAGE}.get_provider_info:get_provider_info" in entry_points


def test_airflow_lists_the_provider(tmp_path: Path) -> None:
    listed = _airflow(tmp_path, "providers", "list")
    versions = {each["package_name"]: each["version"] for each in listed}
    assert versions["airflow-provider-vllm"] == airflow_provider_vllm.__version__


def test_airflow_lists_the_connection_type(tmp_path: Path) -> None:
    hooks = {each["connection_type"]: each for each in _airflow(tmp_path, "providers", "hooks")}
    assert hooks["vllm"]["class"] == f"{PACKAGE}.hooks.vllm.VllmHook"


def _airflow(home: Path, *arguments: str) -> list[dict[str, str]]:
    """The answer of an Airflow command that prints a table, asked for as JSON."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    done = subprocess.run(
        [sys.executable, "-m", "airflow", *arguments, "--output", "json"],
        env={**environ, "AIRFLOW_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *warnings, table = done.stdout.splitlines()
    # Airflow leaves out what of a provider does not import, and only warns.
    assert not [line for line in warnings if PACKAGE in line]
    return json.loads(table)
