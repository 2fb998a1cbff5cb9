"""How a step's prompt tokens are divided among the rows that are behind.

Half of them go to the oldest (in order of rank, see `entry.rank_of`), so that nobody starves; the other half to those who need least (the
oldest of equals), so that a short prompt does not wait for a long one to finish. What one half cannot use, the other gets. Prompts of
equal length are therefore computed one after the other, first come first served, and a long one at half speed or better.
"""

from __future__ import annotations


def divide(budget: int, needs: list[int], fresh: int) -> list[int]:
    """`needs[i]` ≥ 1: tokens that row i still has to feed, in order of rank but for the last `fresh` rows, which were admitted just now
    and get at least one token each (`budget` ≥ `fresh`). Returns each row's share; they add up to min(budget, sum of needs)."""
    if sum(needs) <= budget:
        return list(needs)
    shares = [0] * (len(needs) - fresh) + [1] * fresh
    left = budget - fresh
    first = min(needs[0] - shares[0], (budget + 1) // 2, left)
    shares[0] += first
    left -= first
    for i in sorted(range(len(needs)), key=lambda i: needs[i]):
        more = min(needs[i] - shares[i], left)
        shares[i] += more
        left -= more
    return shares
