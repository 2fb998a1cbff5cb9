"""Which nodes of the drafts at hand are verified: those that together are worth their toll.

The front says what guesses have to bring, the drafts say how likely each is to bring it; so the choice is made here, where both are known,
and with nothing stale in it. Taken in order of their worth, nodes n = 0, 1, … have the survivals s[0] ≥ s[1] ≥ …; those up to the n that
maximizes s[0] + … + s[n] − toll[n] are kept, or none if that is negative. Tolls come in stairs (tiles, cache sizes), so all n are
tried; the first that is no better than the one before says nothing about the next. Any choice is exact: it cannot change the output.

Tolls value time at the speed that guessing makes possible. Where no guesses are worth that, a plain step follows, and it is that step's
speed that counts: a few likely tokens before an unlikely one are had either now, together, or one by one. So before nothing is kept,
the drafts are tried once more at tolls times `discount`, the speed of plain decoding over that of guessing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forerun.engine.drafters.draft import Draft


def survivals(parents: Sequence[int], confidences: Sequence[float]) -> list[float]:
    """Probability that each node is accepted: the product of the confidences on its path."""
    found: list[float] = []
    for parent, confidence in zip(parents, confidences):
        found.append(confidence if parent < 0 else confidence * found[parent])
    return found


def choose(worth: Sequence[Sequence[float]], toll: Sequence[float], discount: float = 1.0) -> list[list[int]]:
    """`worth[r][i]`: survival of node i of draft r, less what this node costs beyond the others; a child is worth no more than its parent.
    `toll[n]`: what n + 1 nodes have to bring. Returns the nodes of each draft that are kept, ascending, parents included."""
    if len(worth) == 1:
        return [_best(worth[0], toll, discount)]
    chosen = _best([value for values in worth for value in values], toll, discount)
    kept: list[list[int]] = []
    first = at = 0
    for values in worth:
        last = first + len(values)
        nodes: list[int] = []
        while at < len(chosen) and chosen[at] < last:
            nodes.append(chosen[at] - first)
            at += 1
        kept.append(nodes)
        first = last
    return kept


def profit(worth: Sequence[float], toll: Sequence[float]) -> float:
    """What the nodes that would be kept bring beyond their toll."""
    values = sorted(worth, reverse=True)[: len(toll)]
    count = _count(values, toll, 1.0)
    return sum(values[:count]) - (toll[count - 1] if count else 0.0)


def _best(worth: Sequence[float], toll: Sequence[float], discount: float) -> list[int]:
    """The nodes that are kept of all there are, ascending."""
    order = sorted(range(len(worth)), key=worth.__getitem__, reverse=True)
    return sorted(order[: _most([worth[i] for i in order[: len(toll)]], toll, discount)])


def _most(values: Sequence[float], toll: Sequence[float], discount: float) -> int:
    """How many are kept, at the tolls and otherwise at what a plain step would cost."""
    return _count(values, toll, 1.0) or (_count(values, toll, discount) if discount < 1.0 else 0)


def _count(values: Sequence[float], toll: Sequence[float], discount: float) -> int:
    """How many of the values, which fall, are worth most over their toll."""
    total = best = 0.0
    count = 0
    for n, value in enumerate(values):
        total += value
        over = total - toll[n] * discount
        if over > best:
            best, count = over, n + 1
    return count


def keep(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The part of a draft with these nodes; each comes behind its parent, which is one of them."""
    count = len(nodes)
    if count == draft.count:
        return draft
    if not count:
        return Draft.none()
    if nodes[-1] == count - 1:  # the first ones, as of a draft whose likeliest nodes come first: nothing moves
        token, parent, confidence, probe = draft.token[:count], draft.parent[:count], draft.confidence[:count], draft.probe[:count]
        return Draft(token, parent, confidence, probe, draft.source[:count])
    place = {node: at for at, node in enumerate(nodes)}
    parents = [draft.parent[node] for node in nodes]
    return Draft(
        [draft.token[node] for node in nodes],
        [place[parent] if parent >= 0 else -1 for parent in parents],
        [draft.confidence[node] for node in nodes],
        [draft.probe[node] for node in nodes],
        [draft.source[node] for node in nodes] if draft.source else (),
    )


def census(drafts: Iterable[Draft]) -> list[int]:
    """How many nodes that are no probes stand 1, 2, … steps behind their root."""
    found: list[int] = []
    for draft in drafts:
        for depth, probe in zip(draft.depths(), draft.probe):
            while depth > len(found):
                found.append(0)
            found[depth - 1] += not probe
    return found


def by_source(drafts: Iterable[tuple[Draft, Sequence[int]]]) -> list[tuple[list[int], list[int]]]:
    """For each of several drafters, in the order in which they are named: nodes that it proposed, and those of them that were accepted,
    1, 2, … steps behind their root. `drafts`: each with its accepted nodes. A node that two of them proposed counts for both."""
    found: list[tuple[list[int], list[int]]] = []
    for draft, accepted in drafts:
        if not draft.source:
            continue
        for node, (bits, depth, probe) in enumerate(zip(draft.source, draft.depths(), draft.probe)):
            for source in range(0 if probe else bits.bit_length()):
                if bits >> source & 1:
                    while source >= len(found):
                        found.append(([], []))
                    for counts, counted in zip(found[source], (True, node in accepted)):
                        counts += [0] * (depth - len(counts))
                        counts[depth - 1] += counted
    return found
