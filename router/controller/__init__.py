"""How much to guess: yields, costs and a guard. Pure functions of what they are told; no clock, no I/O.

Rejection is channel noise, step-time inflation is congestion; they are separate signals and have separate loops. `yields.py` learns
which sequences are worth asking the drafter about, `cost.py` what a step of so many rows takes now (its corrections are filtered by
`filter.py`), `guard.py` opens the circuit when measurement disagrees with both, `price.py` puts them together. `simple.py` has the
controllers it is measured against. Which nodes of the drafts at hand are verified is decided in the worker, where the drafts are
(`engine/drafters/choose.py`), by the tolls that come from here.
"""
