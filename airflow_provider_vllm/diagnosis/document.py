"""The catalogue in; docs/failures.md out. `python -m airflow_provider_vllm.diagnosis.document`
prints it, and a test checks that the file is current.
"""

from __future__ import annotations

from airflow_provider_vllm.diagnosis.catalogue import RULES
from airflow_provider_vllm.diagnosis.rule import GROUPS, Rule
from airflow_provider_vllm.diagnosis.template import plain

_TITLES = {
    "capacity": "Capacity: GPU, host or cache memory",
    "dead_process": "Dead process: ended without a Python error of its own",
    "communication": "Communication: processes and nodes cannot talk",
    "kernel_hardware": "Kernels and hardware",
    "model_config": "Model and launch options",
    "environment": "Environment: packages, files, ports, devices",
    "request": "Request: one request or adapter",
    "network_auth": "Network and access to the model hub",
}
_HEAD = """\
# Failures that the diagnosis knows

Made from the rules by `python -m airflow_provider_vllm.diagnosis.document > docs/failures.md`.

`airflow vllm diagnose vllm.log` names one of these causes, or says that the cause is in no line of
the log. *Launch* says whether starting the server again unchanged can help, *request* whether
sending the same request again can.
"""
_WITHOUT_RULE = """
## Causes that stand in no line

| cause | when |
|---|---|
| `killed_from_outside` | exit by SIGKILL: the host's oom-killer, a container's limit, a person |
| `died_silently` | a process is gone and only wrapper lines say so |
| `orderly_shutdown` | somebody asked the server to stop (verdict `stopped`) |
| `start_unfinished` | the log ends during the start without an error (verdict `stalled`) |
| `worker_hang_shm_broadcast`, `no_progress` | requests run and no token moves (verdict `stalled`) |
| `preflight_...` | a check before the start found what would make it fail; there is no log yet |
| `unrecognised` | an exception that no rule knows; its line is still named |
"""


def document() -> str:
    """The whole page."""
    parts = [_HEAD]
    for group in GROUPS:
        rules = [rule for rule in RULES if rule.group == group]
        if rules:
            parts.append(f"\n## {_TITLES[group]}\n")
            parts.extend(_section(rule) for rule in rules)
    parts.append(_WITHOUT_RULE)
    return "".join(parts)


def _section(rule: Rule) -> str:
    request = {True: "yes", False: "no", None: "not a matter of the request"}[rule.request]
    example = rule.examples[0].split("\n")[-1].strip()
    return (
        f"\n### {rule.id}\n\n{plain(rule.explanation)}\n\n"
        f"- First action: {plain(rule.first_action)}\n"
        f"- Retry: launch {'yes' if rule.launch else 'no'}, request {request}\n"
        + ("- Remedy: one engine argument is computed from the message\n" if rule.remedy else "")
        + f"\n```text\n{example}\n```\n"
    )


if __name__ == "__main__":
    print(document(), end="")
