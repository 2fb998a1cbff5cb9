"""What can be trained: one file a kind, one line in `registry.py`."""
