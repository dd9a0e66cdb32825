"""What an import costs and pulls in: a DAG file is parsed every half minute, in a fresh process."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import airflow_provider_vllm
from airflow_provider_vllm.get_provider_info import get_provider_info

LIMIT_MS = 60
HEAVY = ("openai", "pynvml", "aiohttp", "pycurl", "vllm", "torch", "pyarrow")
# CPU time: a busy machine makes an import late, not longer.
COST = """
import json, sys, time
import airflow.sdk
before = set(sys.modules)
began = time.process_time()
for name in sys.argv[1:]:
    __import__(name)
cost = 1000 * (time.process_time() - began)
print(json.dumps([cost, sorted({m.partition('.')[0] for m in set(sys.modules) - before})]))
"""
PULLED = """
import json, sys
for name in sys.argv[1:]:
    __import__(name)
print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))
"""


def modules(folder: str) -> list[str]:
    """Every module of one room of the package, below it too."""
    package = importlib.import_module(f"airflow_provider_vllm.{folder}")
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return sorted(module.name for module in found if not module.name.endswith("__main__"))


def ask(program: str, names: list[str], home: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        env={**os.environ, "AIRFLOW_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_operators_sensors_and_policies_are_light(tmp_path: Path) -> None:
    names = [*modules("operators"), *modules("sensors"), *modules("policies")]
    asked = [ask(COST, names, tmp_path) for _ in range(5)]
    cost = statistics.median(cost for cost, _ in asked)
    assert cost < LIMIT_MS
    assert not set(asked[0][1]) & set(HEAVY)


def test_what_dag_files_use_besides_is_light(tmp_path: Path) -> None:
    """A literal output schema is looked at while the file is read, and `split` and `merge` are called in its tasks."""
    names = ["schema", "shards", "spec"]
    pulled = ask(PULLED, [f"airflow_provider_vllm.batch.{name}" for name in names], tmp_path)
    assert not set(pulled) & set(HEAVY)


def test_the_package_itself_imports_nothing(tmp_path: Path) -> None:
    pulled = ask(PULLED, ["airflow_provider_vllm"], tmp_path)
    assert not set(pulled) & {*HEAVY, "airflow"}


@pytest.mark.parametrize("room", ["server", "batch", "diagnosis"])
def test_three_rooms_know_nothing_of_airflow(room: str, tmp_path: Path) -> None:
    names = [name for name in modules(room) if not name.endswith("hub_fetch")]
    assert "airflow" not in ask(PULLED, names, tmp_path)


def test_the_public_names_are_the_truth() -> None:
    names = airflow_provider_vllm.__all__
    assert set(names) == {*airflow_provider_vllm._NAMES, "__version__"}
    for name in names:
        found = getattr(airflow_provider_vllm, name)
        assert name.startswith("__") or found.__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        airflow_provider_vllm.nonsense  # noqa: B018


def test_all_of_every_module_is_the_truth() -> None:
    for room in ("operators", "sensors", "hooks", "policies", "server", "batch", "diagnosis"):
        for name in modules(room):
            module = importlib.import_module(name)
            for public in getattr(module, "__all__", ()):
                assert hasattr(module, public), f"{name}.{public}"


def test_what_the_provider_info_names_is_there() -> None:
    info = get_provider_info()
    for kind in ("operators", "sensors", "hooks"):
        (listed,) = [entry["python-modules"] for entry in info[kind]]
        for name in listed:
            importlib.import_module(name)
    (connection,) = info["connection-types"]
    module, _, name = connection["hook-class-name"].rpartition(".")
    hook = getattr(importlib.import_module(module), name)
    assert hook.conn_type == connection["connection-type"]
    assert hook.hook_name == connection["hook-name"]
