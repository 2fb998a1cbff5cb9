"""What a streamed token costs in the server: from the router's call to the bytes handed to the transport."""

from __future__ import annotations

import time
from collections.abc import Callable

from forerun.messages import SamplingParams
from forerun.router.request import Run
from forerun.server.answer import Form
from forerun.server.events import Channel, EventStream, Outbox
from forerun.server.metrics import Metrics
from forerun.server.pace import Pace
from forerun.server.transcript import Transcript
from forerun.server.voice import NativeVoice
from tests.server.front import byte_level

TOKENS = 5_000
BOUND_SECONDS = 12e-6
"""The bar for the whole front is 15 µs, with the ring, the scheduler and the kernel; an idle core of 2025 needs 3 µs for this part."""


class Sink:
    """A transport that takes everything."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


async def test_a_token_costs_microseconds(record_property: Callable[[str, object], None]) -> None:
    tokenizer = byte_level()
    params = SamplingParams(1, 1, 1 << 30, sample=True, stop_ids=tokenizer.eos_ids)
    transcript = Transcript(tokenizer, tokenizer.detokenizer([1]), None, params)
    voice = NativeVoice(Form("", True, False, 1), params)
    channel = Channel(voice, Outbox(), chunked=True)
    stream = EventStream(transcript, Pace(Metrics().requests, time.monotonic()), voice, channel)
    channel.open(Sink())
    runs = [Run([index % 250], [-1.5351561903953552 - index], [], []) for index in range(TOKENS)]
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for run in runs:
            stream.tokens(run)
            channel.flush()
        best = min(best, (time.process_time() - began) / TOKENS)
    channel.close()
    record_property("seconds_a_token", best)
    assert best < BOUND_SECONDS
