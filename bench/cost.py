"""What serving costs when the device has a price an hour. The currency is the reader's."""

from __future__ import annotations

import dataclasses

HOUR = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Infinite when nothing was served."""

    million_tokens: float
    request: float

    @classmethod
    def of(cls, device_hour_price: float, tokens_per_second: float, requests_per_second: float) -> Cost:
        second = device_hour_price / HOUR
        return cls(_each(second * 1e6, tokens_per_second), _each(second, requests_per_second))

    def __str__(self) -> str:
        return f"{self.million_tokens:.4g} a million tokens, {self.request:.3g} a request"


def _each(price: float, rate: float) -> float:
    return price / rate if rate > 0 else float("inf")
