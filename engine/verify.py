"""Walk a draft from its root by comparing integers. Nothing else happens here: no tensors, no probabilities, no state."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.engine.drafters.draft import Draft


def walk(draft: Draft, picks: Sequence[int]) -> list[int]:
    """The accepted nodes, root side first. `picks[0]` is the target's token at the root, `picks[1 + i]` the one at node i.

    From where we stand, step to the first child that carries the token the target picked there; stop where there is none: the pick
    there is the bonus. A probe is never stepped to. Since a parent comes before its child, one pass over the nodes is the whole walk.
    """
    path: list[int] = []
    at = -1
    for node, (token, parent) in enumerate(zip(draft.token, draft.parent)):
        if parent == at and token == picks[at + 1] and not draft.probe[node]:
            path.append(node)
            at = node
    return path
