"""docs/failures.md is what the catalogue says now."""

from __future__ import annotations

from pathlib import Path

from airflow_provider_vllm.diagnosis.catalogue import RULES
from airflow_provider_vllm.diagnosis.document import document

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"


def test_the_page_is_current_and_documents_every_rule() -> None:
    text = document()
    assert PAGE.read_text(encoding="utf-8") == text
    for rule in RULES:
        assert f"### {rule.id}\n" in text
