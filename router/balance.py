"""Which replica takes a sequence: one that served the same beginning before, unless another has much less to do.

Owns the memory of which beginning went where. Knows how full a replica is, not what it does.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

from forerun.router.request import Request

BEGINNING_TOKENS = 32
"""Prompts that agree in this many first tokens are likely to share more; shorter ones are not worth a detour."""
REMEMBERED = 4096
DETOUR = 4
"""A known beginning is followed to a replica with at most this many sequences more than the emptiest."""


class Choice(Protocol):
    """What can be chosen."""

    @property
    def alive(self) -> int:
        """Sequences waiting or running there."""
        ...


C = TypeVar("C", bound=Choice)


class Balance:
    def __init__(self) -> None:
        self._seen: collections.OrderedDict[Hashable, object] = collections.OrderedDict()

    def choose(self, choices: Sequence[C], request: Request) -> C:
        """One of `choices` (at least one)."""
        emptiest = min(choices, key=lambda choice: choice.alive)
        if len(choices) == 1 or len(request.tokens) < BEGINNING_TOKENS or not request.cache:
            return emptiest
        beginning = (request.tenant, request.adapter, *request.tokens[:BEGINNING_TOKENS])
        known = self._seen.get(beginning)
        near = [choice for choice in choices if choice is known and choice.alive <= emptiest.alive + DETOUR]
        chosen = near[0] if near else emptiest
        self._seen[beginning] = chosen
        self._seen.move_to_end(beginning)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return chosen
