"""The arithmetic. `reference.py` states every op in plain torch; the folders beside it do the same work fast."""
