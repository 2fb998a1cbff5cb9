"""What the server has besides its configuration and the router; filled while it starts."""

from __future__ import annotations

import dataclasses

from forerun.server.grammar import GrammarReader
from forerun.server.metrics import Metrics
from forerun.server.telemetry import NoTracing, Tracing
from forerun.server.text import Tokenizer


@dataclasses.dataclass(slots=True)
class Services:
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    """`metrics.batch` is the router's Observer"""
    grammars: GrammarReader = dataclasses.field(default_factory=GrammarReader)
    tokenizer: Tokenizer | None = None
    """None until it is loaded; inference is refused as long"""
    tracing: Tracing = dataclasses.field(default_factory=NoTracing)
