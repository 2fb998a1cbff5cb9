"""An error that an operator can do something about.

The worker turns it into a `Fault` (forerun/messages.py); a command prints both lines and leaves.
"""

from __future__ import annotations


class StartError(Exception):
    """The model cannot be served as asked. `error`: what is wrong, one line. `cure`: what to do about it. Starting again with the
    same settings fails alike."""

    def __init__(self, error: str, cure: str) -> None:
        super().__init__(f"{error}; {cure}" if cure else error)
        self.error = error
        self.cure = cure
