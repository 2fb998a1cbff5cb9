"""The times of one request: where they were spent, as response headers and as the log line say it.

arrived ──validation──▶ queued ──queue──▶ started ──inference──▶ ended
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Durations in seconds."""

    validation: float
    queue: float
    inference: float

    @property
    def total(self) -> float:
        return self.validation + self.queue + self.inference

    def per_token(self, generated: int) -> float:
        return self.inference / max(1, generated)

    @classmethod
    def between(cls, arrived: float, queued: float, started: float, ended: float) -> Timing:
        """From monotonic times. A sequence that never started was in the queue all the time."""
        started = started or ended
        return cls(validation=queued - arrived, queue=started - queued, inference=ended - started)

    def headers(self, generated: int) -> dict[str, str]:
        """TGI's timing headers: seconds as text once, whole milliseconds else."""
        return {
            "x-compute-time": repr(self.total),
            "x-total-time": _ms(self.total),
            "x-validation-time": _ms(self.validation),
            "x-queue-time": _ms(self.queue),
            "x-inference-time": _ms(self.inference),
            "x-time-per-token": _ms(self.per_token(generated)),
        }

    def facts(self, generated: int) -> dict[str, str]:
        """For the log line."""
        return {
            "total_time": _text(self.total),
            "validation_time": _text(self.validation),
            "queue_time": _text(self.queue),
            "inference_time": _text(self.inference),
            "time_per_token": _text(self.per_token(generated)),
        }


def _ms(seconds: float) -> str:
    return str(int(seconds * 1000))


def _text(seconds: float) -> str:
    """A duration as TGI's log prints it: 1.5s, 23.4ms, 812µs."""
    if seconds >= 1:
        return f"{seconds:.6g}s"
    return f"{seconds * 1e3:.6g}ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g}µs"
