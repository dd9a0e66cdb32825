"""Apache Airflow provider for vLLM: bring a server up, prove it ready, run the batch, take it down.

The public names below are loaded when they are first used, so that a DAG file is parsed quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "GpuAvailableSensor": "sensors.gpu",
    "ServerSpec": "spec",
    "StartVllmServerOperator": "operators.start",
    "StopVllmServerOperator": "operators.stop",
    "VllmBatchOperator": "operators.batch",
    "VllmHook": "hooks.vllm",
    "VllmRetryPolicy": "policies.retry",
    "VllmServerReadySensor": "sensors.ready",
    "vllm_server": "operators.server",
}

__all__ = [
    "GpuAvailableSensor",
    "ServerSpec",
    "StartVllmServerOperator",
    "StopVllmServerOperator",
    "VllmBatchOperator",
    "VllmHook",
    "VllmRetryPolicy",
    "VllmServerReadySensor",
    "__version__",
    "vllm_server",
]

if TYPE_CHECKING:
    from airflow_provider_vllm.hooks.vllm import VllmHook
    from airflow_provider_vllm.operators.batch import VllmBatchOperator
    from airflow_provider_vllm.operators.server import vllm_server
    from airflow_provider_vllm.operators.start import StartVllmServerOperator
    from airflow_provider_vllm.operators.stop import StopVllmServerOperator
    from airflow_provider_vllm.policies.retry import VllmRetryPolicy
    from airflow_provider_vllm.sensors.gpu import GpuAvailableSensor
    from airflow_provider_vllm.sensors.ready import VllmServerReadySensor
    from airflow_provider_vllm.spec import ServerSpec


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
