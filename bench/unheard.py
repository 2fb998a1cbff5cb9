"""A stream that nobody listens to, for what drives the router without clients."""

from __future__ import annotations

from forerun.router.request import Failure, Run


class Unheard:
    """A TokenStream."""

    def tokens(self, run: Run) -> bool:
        return False

    def end(self, reason: str) -> None:
        return None

    def fail(self, failure: Failure) -> None:
        return None
