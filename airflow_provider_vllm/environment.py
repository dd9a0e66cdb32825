"""The child's environment: the worker's own goes in, an allow-list of it comes out.

A worker's environment holds database, broker and cloud passwords (`AIRFLOW__*` above all). None of
them reaches vLLM unless a ServerSpec names the variable in `env`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"

# In the environment of every process of a server, with the nonce of its start: what has closed its
# streams and made a session of its own is still found by it.
START_MARK = "AIRFLOW_VLLM_START"

_ALLOWED_NAMES = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH NO_COLOR DO_NOT_TRACK
    XDG_CACHE_HOME XDG_CONFIG_HOME HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy https_proxy
    no_proxy all_proxy SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE CC CXX
    HF_HOME HF_ENDPOINT HF_TOKEN HF_TOKEN_PATH HUGGING_FACE_HUB_TOKEN MODELSCOPE_CACHE KMP_AFFINITY
    GLOG_minloglevel
    """.split()  # noqa: SIM905 - forty names read better as text
)
_ALLOWED_PREFIXES = tuple(
    """
    LC_ CUDA_ NVIDIA_ NCCL_ VLLM_ HF_HUB_ HF_XET_ TRANSFORMERS_ TOKENIZERS_ TORCH_ TORCHINDUCTOR_
    PYTORCH_ TRITON_ FLASHINFER_ OMP_ MKL_ GLOO_ UCX_ RAY_ ROCM_ HIP_ HSA_ ROCR_ SLURM_ TP_
    """.split()  # noqa: SIM905
)
_DENIED_NAMES = frozenset({"VLLM_API_KEY"})

# Whole words of a name, ends of words, and what gives a name away wherever it stands.
_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:KEYS?|PWD|AUTH|PAT|SAS|JWT|BEARER|COOKIES?|CREDS?|SIGNATURE|DSN|CONN)(?=[_.-]|$)"
    r"|(?:(?<!COM)(?<!BY)(?<!SUR)(?<!TRES)(?<!OVER)(?<!UNDER)PASS|PASSWD|TOKEN(?!_(?:THRESHOLD|LIMIT|BUDGET|COUNT))|ACCESSKEY)(?=[_.-]|$)"
    r"|PASSWORD|PASSPHRASE|SECRET|API_?KEY|PRIVATE_?KEY|CREDENTIAL|AUTHORIZATION"
    r"|CONN(?:ECTION)?_?STR(?:ING)?(?=[_.-]|$)",
    re.IGNORECASE,
)


def looks_secret(name: str) -> bool:
    """Whether a variable of this name probably holds a secret."""
    return bool(_SECRET_NAME.search(name))


def holds_credentials(value: str) -> bool:
    """Whether a value is an URL with a password in it, such as a proxy's or a database's."""
    return bool(re.search(r"://[^/\s:@]*:[^/\s@]+@", value))


def allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that vLLM may see."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _DENIED_NAMES
        and (name in _ALLOWED_NAMES or name.startswith(_ALLOWED_PREFIXES))
    }
