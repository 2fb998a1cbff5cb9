"""How hypothesis searches. In the suite that every change must pass: the same examples each time and no clock, so that a change fails for
what it changed. `--hypothesis-profile explore` looks for new examples; what it finds becomes an `@example`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("steady")
