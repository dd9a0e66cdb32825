"""Airflow's metadata for this provider: what it finds through the entry point `apache_airflow_provider`."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Modules, connection type, configuration and commands, as Airflow's provider schema names them."""
    integration = "vLLM"
    return {
        "package-name": "airflow-provider-vllm",
        "name": "vLLM",
        "description": "Scheduled batch inference on vLLM servers that Airflow starts, proves ready and ends.",
        "integrations": [
            {
                "integration-name": integration,
                "external-doc-url": "https://docs.vllm.ai/",
                "tags": ["ai"],
            }
        ],
        "operators": [
            {
                "integration-name": integration,
                "python-modules": [
                    "airflow_provider_vllm.operators.batch",
                    "airflow_provider_vllm.operators.server",
                    "airflow_provider_vllm.operators.start",
                    "airflow_provider_vllm.operators.stop",
                ],
            }
        ],
        "sensors": [
            {
                "integration-name": integration,
                "python-modules": [
                    "airflow_provider_vllm.sensors.gpu",
                    "airflow_provider_vllm.sensors.ready",
                ],
            }
        ],
        "hooks": [
            {
                "integration-name": integration,
                "python-modules": ["airflow_provider_vllm.hooks.vllm"],
            }
        ],
        "connection-types": [
            {
                "connection-type": "vllm",
                "hook-name": "vLLM",
                "hook-class-name": "airflow_provider_vllm.hooks.vllm.VllmHook",
                "conn-fields": {
                    "model": {
                        "label": "Model",
                        "description": "Served name; empty: the first that the server lists",
                        "schema": {"type": ["string", "null"]},
                    },
                    "timeout": {
                        "label": "Timeout (s)",
                        "schema": {"type": ["number", "null"], "minimum": 1},
                    },
                },
                "ui-field-behaviour": {
                    "hidden-fields": ["login", "extra"],
                    "relabeling": {"password": "API key", "schema": "http or https"},
                    "placeholders": {"host": "http://gpu-host", "port": "8000"},
                },
            }
        ],
        "config": {
            "vllm": {
                "description": "vLLM servers on this worker.",
                "options": {
                    "state_root": {
                        "description": "Directory for servers and GPU locks, on the worker's own disk. "
                        "Default: AIRFLOW_HOME/vllm.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "/var/lib/airflow/vllm",
                        "default": "",
                    },
                    "python": {
                        "description": "Interpreter that has vLLM. Default: the one that runs the task.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "/opt/vllm/bin/python",
                        "default": "",
                    },
                    "keep_failed_days": {
                        "description": "Days to keep the directory of a server that has ended, for inspection.",
                        "version_added": "0.1.0",
                        "type": "float",
                        "example": None,
                        "default": "7",
                    },
                },
            }
        },
        "cli": ["airflow_provider_vllm.cli.get_vllm_cli_commands"],
    }
