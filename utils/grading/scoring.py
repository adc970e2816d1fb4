"""What the checks of an exercise are worth, and what those that passed earn.

Core checks share `core_share` of an exercise's points in the proportion of their own `points`,
hardening checks the rest; where there is one tier alone, it has all of them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

CORE_SHARE = 2 / 3


class Scorable(Protocol):
    """A check, or what a report says of one."""

    points: float
    tier: str
    earns_alone: bool


def weigh(checks: Sequence[Any], worth: float, core_share: float = CORE_SHARE) -> list[float]:
    """Return what each check is worth, of the `worth` of their exercise."""
    shares = {"core": core_share, "hardening": 1 - core_share}
    totals = {tier: sum(c.points for c in checks if c.tier == tier) for tier in shares}
    if not all(totals.values()):
        shares = dict.fromkeys(shares, 1.0)
    return [worth * shares[c.tier] * c.points / totals[c.tier] for c in checks]


def earn(checks: Sequence[Any], passed: Sequence[bool], weights: Sequence[float]) -> list[float]:
    """Return what each check earns.

    What a worked example expects can be copied from it: those count beside another check that
    passes, not alone.
    """
    others = [p for check, p in zip(checks, passed, strict=True) if check.earns_alone]
    is_earned = any(others) or not others
    return [w if p and is_earned else 0.0 for p, w in zip(passed, weights, strict=True)]
