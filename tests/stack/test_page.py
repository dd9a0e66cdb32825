"""docs/what-you-see.md has one row for each scenario, and no other."""

from __future__ import annotations

import re

from scripts.set_up import ROOT
from tests.stack import test_scenarios, test_worker_scenarios

ROW = re.compile(r"^\|.*\| `(\w+)` \|$", re.MULTILINE)


def test_each_scenario_is_a_row_of_the_page_and_each_row_a_scenario() -> None:
    rows = ROW.findall((ROOT / "docs" / "what-you-see.md").read_text(encoding="utf-8"))
    scenarios = [
        *test_scenarios.scenario,
        *test_worker_scenarios.scenario,
        *test_worker_scenarios.last_scenario,
    ]
    assert sorted(rows) == sorted(scenarios)
