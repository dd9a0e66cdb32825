"""Rules: the model hub cannot be reached, or does not let us in."""

# ruff: noqa: E501 (log lines stay whole)

from __future__ import annotations

from airflow_provider_vllm.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        id="gated_rejected",
        group="network_auth",
        pattern=r"has been rejected by the repo's authors",
        explanation="The model's authors refused this account.",
        first_action="Take another model; a retry cannot help.",
        launch=False,
        request=None,
        examples=(
            "huggingface_hub.errors.GatedRepoError: 403 Client Error. Your request to access model a/b has been rejected by the repo's authors.",
        ),
    ),
    Rule(
        id="gated_repo",
        group="network_auth",
        pattern=r"GatedRepoError|You are trying to access a gated repo|Access to model \S+ is restricted|Cannot access gated repo",
        explanation="The model is gated, and this token (or no token) may not read it.",
        first_action="Accept the model's terms on the hub and give that account's token with hf_conn_id.",
        launch=False,
        request=None,
        examples=(
            "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-2) Cannot access gated repo for url https://huggingface.co/a/b/resolve/main/config.json.",
            "OSError: You are trying to access a gated repo.",
        ),
    ),
    Rule(
        id="rate_limited",
        group="network_auth",
        pattern=r"429 Client Error|Too Many Requests|rate limit(?:ed)? .{0,60}(?:hub|huggingface|download)",
        explanation="The hub limits the rate of this address or account.",
        first_action="Wait a few minutes and start again, with a token (hf_conn_id) or a cached model.",
        launch=True,
        request=None,
        examples=(
            "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/models/a/b",
        ),
    ),
    Rule(
        id="model_path_not_found",
        group="network_auth",
        pattern=r"HFValidationError: Repo id must (?:be in the form|use alphanumeric)|Incorrect path_or_model_id|Repo id must be in the form '[^']*' or '[^']*': '(?P<path>[^']+)'|Can't load (?:the )?(?:config(?:uration)?|model) (?:for|of) '(?P<name>[^']+)'|Invalid repository ID or local directory specified",
        explanation="The model is a path that does not exist on this worker (so it was taken for a hub id).",
        first_action="Check the path on the worker that runs the task (mounts!) and its spelling.",
        launch=False,
        request=None,
        examples=(
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/data/no_such_model'. Use `repo_type` argument if needed.",
        ),
    ),
    Rule(
        id="repository_not_found",
        group="network_auth",
        pattern=r"RepositoryNotFoundError|Repository Not Found|is not a local folder and is not a valid model identifier|RevisionNotFoundError|Invalid rev id|NotExistError: .*modelscope|The request model: .* does not exist",
        explanation="The hub has no model of this name, or it is private and the token may not see it.",
        first_action="Check the model's name; for a private model give a token with hf_conn_id.",
        launch=False,
        request=None,
        examples=(
            "OSError: no-such-org/no-such-model is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'",
        ),
    ),
    Rule(
        id="config_not_found",
        group="network_auth",
        pattern=r"No supported config format found in (?P<model>\S+)|does not appear to have a file named config\.json",
        explanation="vLLM found no config.json[ for {model}]: the path is wrong, or the hub gave no access (this release hides which).",
        first_action="Check the model's path or name, and for a gated model the token in hf_conn_id.",
        launch=False,
        request=None,
        confidence=0.85,
        examples=(
            "ERROR 02-17 19:14:36 engine.py:389] ValueError: No supported config format found in mistralai/Mistral-7B-v0.1",
        ),
    ),
    Rule(
        id="hub_offline",
        group="network_auth",
        pattern=r"outgoing traffic has been disabled|offline mode is enabled|OfflineModeIsEnabled|Cannot find (?:an appropriate cached snapshot|the requested files in the (?:local|disk) cache)|(?:cached files|disk cache) and outgoing traffic",
        explanation="The model is not in the local cache, and the hub is switched off (offline mode).",
        first_action="Download the model into the cache of this worker, or unset HF_HUB_OFFLINE.",
        launch=False,
        request=None,
        examples=(
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the specified revision on the local disk and outgoing traffic has been disabled.",
        ),
    ),
    Rule(
        id="hub_unreachable",
        group="network_auth",
        pattern=r"Temporary failure in name resolution|Name or service not known|NameResolutionError|Max retries exceeded with url|MaxRetryError|SSLError|SSLCertVerificationError|CERTIFICATE_VERIFY_FAILED|We couldn't connect to 'https://\S+'|LocalEntryNotFoundError|(?:Read|Connect)Timeout.{0,80}huggingface|ConnectionError: .{0,60}(?:huggingface|hf\.co|modelscope|resolve/main)|ProxyError|Network is unreachable|Consistency check failed|(?:50[0234]) Server Error.{0,60}huggingface|IncompleteRead|ChunkedEncodingError|ProtocolError: .*Connection broken|xet.{0,40}(?:[Ee]rror|[Ff]ail)|CAS service error|Data processing error: |ReqwestMiddleware",
        explanation="The model hub could not be reached, or the download broke.",
        first_action="Check this worker's network, proxy and DNS; or download the model beforehand and give its path.",
        launch=True,
        request=None,
        examples=(
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
            "requests.exceptions.SSLError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /a/b/resolve/main/config.json",
        ),
        near_misses=(
            "(APIServer pid=1) ERROR 11-30 10:00:00 [repo_utils.py:171] Error retrieving file list: timeout, retrying 1 of 2",
        ),
    ),
    Rule(
        id="hub_unauthorized",
        group="network_auth",
        pattern=r"Invalid (?:username or password|credentials)|Token is required|401 Client Error|403 (?:Client Error|Forbidden)|Invalid user token",
        explanation="The hub does not accept this token.",
        first_action="Renew the token in the connection that hf_conn_id names.",
        launch=False,
        request=None,
        confidence=0.85,
        examples=(
            "huggingface_hub.errors.HfHubHTTPError: Invalid user token. If you didn't pass a user token, make sure you are properly logged in.",
        ),
    ),
)
