"""What of the worker's environment vLLM may see."""

from __future__ import annotations

import pytest

from airflow_provider_vllm.environment import allowed, looks_secret


@pytest.mark.parametrize(
    "name",
    [
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "AIRFLOW__CELERY__BROKER_URL", "AIRFLOW_CONN_MY_DB", "AIRFLOW_VAR_X",
        "AIRFLOW_HOME", "DATABASE_URL", "BROKER_URL", "CELERY_RESULT_BACKEND", "REDIS_PASSWORD", "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_CLIENT_SECRET", "VLLM_API_KEY", "PYTHONPATH",
        "PYTHONSTARTUP", "LD_PRELOAD", "OPENAI_API_KEY", "SSH_AUTH_SOCK", "_AIRFLOW_PROCESS_CONTEXT",
        "KUBERNETES_SERVICE_HOST",
    ],
)  # fmt: skip
def test_stays_with_the_worker(name: str) -> None:
    assert allowed({name: "x"}) == {}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "LC_ALL",
        "LD_LIBRARY_PATH",
        "VLLM_CPU_KVCACHE_SPACE",
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
        "NCCL_DEBUG",
        "CUDA_HOME",
        "HTTPS_PROXY",
    ],
)
def test_reaches_vllm(name: str) -> None:
    assert allowed({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True), ("MY_PASSWORD", True), ("DB_PASSWD", True), ("API_KEY", True), ("OPENAI_APIKEY", True),
        ("AWS_SECRET_ACCESS_KEY", True), ("my_secret_thing", True), ("GIT_CREDENTIALS", True), ("MYPASSWORD", True),
        ("GITHUB_PAT", True), ("DB_PASS", True), ("PGPASS", True), ("PGPASSWORD", True), ("MY_PASSPHRASE", True),
        ("AUTHORIZATION", True), ("COOKIE", True), ("CREDS", True), ("MY_CRED", True), ("JWT", True), ("BEARER", True),
        ("SAS_URL", True), ("AZURE_STORAGE_CONNECTION_STRING", True), ("CONN_STRING", True), ("SENTRY_DSN", True),
        ("AIRFLOW_CONN_DB", True), ("GITHUBTOKEN", True), ("TLS_PRIVATE_KEY", True), ("HTTP_AUTH", True),
        ("PATH", False), ("COMPASS_X", False), ("VLLM_USE_V1", False), ("VLLM_USE_PRECOMPILED", False),
        ("HF_HUB_OFFLINE", False), ("HF_HUB_ENABLE_HF_TRANSFER", False), ("CUDA_VISIBLE_DEVICES", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", False), ("BYPASS", False), ("PATTERN", False), ("AUTHOR", False),
        ("MAX_TOKENS", False), ("SASL_MECHANISM", False), ("VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", False),
        ("NCCL_SOCKET_IFNAME", False), ("LD_LIBRARY_PATH", False), ("XDG_SESSION_ID", False),
        ("HF_HOME", False), ("TOKENIZERS_PARALLELISM", False), ("VLLM_KEYBOARD", False), ("OMP_NUM_THREADS", False),
    ],
)  # fmt: skip
def test_names_that_look_like_secrets(name: str, secret: bool) -> None:
    assert looks_secret(name) is secret
