"""When a server ends by itself: time is given, nothing waits."""

from __future__ import annotations

import pytest

from airflow_provider_vllm.server.lease import Lease


def lease(idle: float = 10, life: float | None = None) -> Lease:
    return Lease.start(100.0, idle_timeout=idle, max_lifetime=life)


@pytest.mark.parametrize(
    ("life", "now", "why"),
    [
        (None, 109.9, None),
        (None, 110.0, "idle"),
        (5, 105.0, "max_lifetime"),
        (5, 104.9, None),
        (10, 110.0, "max_lifetime"),
        (20, 110.0, "idle"),
    ],
)
def test_it_ends_at_the_nearer_of_its_two_limits(
    life: float | None, now: float, why: str | None
) -> None:
    assert lease(life=life).ended(now) == why


def test_a_renewal_moves_the_idle_end_and_never_the_lifetime() -> None:
    renewed = lease(life=15).renew(109.0)
    assert renewed.until == 115.0
    assert renewed.ended(114.9) is None
    assert renewed.ended(115.0) == "max_lifetime"


def test_a_new_idle_timeout_holds_from_the_renewal_on() -> None:
    shorter = lease().renew(105.0, 2.0)
    assert shorter.until == 107.0
    assert shorter.renew(106.0).until == 108.0


def test_until_and_ended_agree() -> None:
    for given in (lease(), lease(life=3), lease(life=30).renew(125.0)):
        assert given.ended(given.until) is not None
        assert given.ended(given.until - 0.001) is None
