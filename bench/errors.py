"""What stops a measurement."""

from __future__ import annotations


class BenchError(RuntimeError):
    """Nothing was measured, or what was measured says nothing. The message says why and what to do."""
