"""All rules, in the order in which they are asked: the first that knows a message speaks for it.

Special causes stand before general ones, so the order inside each group's file matters too.
"""

from __future__ import annotations

import re

from airflow_provider_vllm.diagnosis import (
    arguments,
    capacity,
    communication,
    dead_process,
    environment,
    generic,
    kernel_hardware,
    model_config,
    network_auth,
    request,
)
from airflow_provider_vllm.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = (
    *dead_process.INTERRUPTS,
    *request.RULES,
    *capacity.RULES,
    *communication.CLIENTS,
    *network_auth.RULES,
    *arguments.RULES,
    *model_config.RULES,
    *environment.RULES,
    *kernel_hardware.RULES,
    *communication.RULES,
    *dead_process.RULES,
    *generic.RULES,
)
NATIVE: re.Pattern[str] = re.compile(
    "|".join(f"(?:{re.sub(r'[?]P<[a-z_]+>', '?:', rule.pattern)})" for rule in RULES if rule.native)
)
"""Finds the messages of all native rules; their groups are without names here."""


def by_id(rule_id: str) -> Rule:
    """The rule of this id. Raises KeyError where there is none."""
    for rule in RULES:
        if rule.id == rule_id:
            return rule
    raise KeyError(rule_id)
