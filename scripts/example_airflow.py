"""Settings and environment for an Airflow that runs the example DAGs on this machine.

Enters: `MODEL` of the environment (a path or a hub id; the small instruct model without it) and
what set_up.py made. Leaves: what AirflowStack takes. Demo, UI and tests share it, so that all three
run the same thing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.airflow_stack import AirflowStack
from scripts.models import INSTRUCT
from scripts.progress import Progress
from scripts.set_up import MODELS, ROOT, vllm_build

# Enough for the examples, and within a small machine's memory (GiB, a whole number).
CPU_CACHE_GIB = "1"


def example_model() -> str:
    """The model that the example DAGs serve."""
    return os.environ.get("MODEL") or str(MODELS / INSTRUCT)


def example_airflow(
    home: Path, dag_folders: Sequence[Path], progress: Progress | None = None, **further: Any
) -> AirflowStack:
    """An Airflow in `home` for these DAGs, not started; `further` as in AirflowStack."""
    settings = {**example_settings(home), **further.pop("settings", {})}
    environ = {**example_environ(home), **further.pop("environ", {})}
    return AirflowStack(
        home, dag_folders, settings=settings, environ=environ, progress=progress, **further
    )


def example_settings(home: Path) -> dict[str, dict[str, str]]:
    """airflow.cfg sections of the provider: where vLLM is, where servers keep their state."""
    return {
        "vllm": {
            "python": str(ROOT / ".venv-vllm" / "bin" / "python"),
            "state_root": str(home / "vllm"),
        }
    }


def example_environ(home: Path) -> dict[str, str]:
    """What the example DAGs ask for (EXAMPLE_MODEL, EXAMPLE_DATA), and what vLLM has to know of here."""
    environ = {
        "EXAMPLE_MODEL": example_model(),
        "EXAMPLE_DATA": str(home / "data"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if vllm_build() == "cpu":
        environ["VLLM_CPU_KVCACHE_SPACE"] = CPU_CACHE_GIB
        # vLLM 0.32's bfloat16 (its choice for "auto", too) gives wrong text on a virtual CPU with AMX.
        environ["EXAMPLE_DTYPE"] = "float32"
    if Path(example_model()).is_dir():
        environ["HF_HUB_OFFLINE"] = "1"  # nothing to fetch: no waiting for a hub out of reach
    return environ
