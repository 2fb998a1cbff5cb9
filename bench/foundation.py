"""The speed bars of the foundation, measured in one run: our server from outside, beside the bare forward in a plain loop.

What is compared is interleaved round by round, so that a machine that slows down slows both, and medians are reported. Everything
shares the cores of this machine, the load generator too; how much of a core it took is part of the output.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from forerun.bench import process, prompts
from forerun.bench.apis import APIS, Ask
from forerun.bench.bars import Bar
from forerun.bench.errors import BenchError
from forerun.bench.launched import Launched, ours
from forerun.bench.load import Amount, Load, Target
from forerun.bench.records import Record, Shape, steady_rate
from forerun.bench.stats import median
from forerun.bench.yardstick import Loop
from forerun.bench.yardstick import bare as bare_loop

MB = 1_000_000
PROMPT_TOKENS = 64
ROWS = 16
FRONT_STREAMS = 64
SCREENINGS = 8
MODEL_FLAGS = {"--max-batch-total-tokens": "16384", "--max-total-tokens": "1024"}
"""unless given otherwise; a pool that the runs fill, so that the bar on memory is about memory that is touched"""
ECHO_FLAGS = ("--echo",)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured. `rounds`: of the interleaved comparison; `tokens`: new ones in a decode run; `firsts`: prompts timed to their
    first token a round; `soak_requests`, `soak_seconds`: the memory run ends with whichever comes first; `front_rounds`: runs against
    the echo of `front_tokens` a stream; `short_seconds`: of short requests a round."""

    starts: int = 3
    rounds: int = 5
    tokens: int = 128
    firsts: int = 6
    soak_requests: int = 10_000
    soak_seconds: float = 75.0
    front_rounds: int = 5
    front_tokens: int = 256
    short_seconds: float = 3.0

    @classmethod
    def quick(cls) -> Settings:
        return cls(starts=1, rounds=2, firsts=4, soak_seconds=10.0, front_rounds=2, short_seconds=2.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A load's records, the processor seconds that the client and the front took meanwhile, and the wall time."""

    records: list[Record]
    client_cpu: float
    front_cpu: float
    seconds: float


class Foundation:
    """Runs the parts and gathers bars, remarks for people and details for the JSON file."""

    PARTS = ("start", "speed", "memory", "front")

    def __init__(self, model_id: str, flags: Sequence[str], settings: Settings, progress: Callable[[str], None]) -> None:
        self._model_id = model_id
        self._flags = list(flags)
        self._settings = settings
        self._progress = progress
        self._seed = 0
        self._long: list[str] = []
        self.details: dict[str, Any] = {}
        self.remarks: list[str] = []

    async def run(self, parts: Sequence[str]) -> list[Bar]:
        """Raises BenchError (StartFailed when the server does not start)."""
        bars: list[Bar] = []
        others = process.Others()
        if set(parts) & {"start", "speed", "memory"}:
            bars += await self._with_model(parts)
        if "front" in parts:
            async with Launched(ours(self._model_id, [*self._flags, *ECHO_FLAGS])) as server:
                bars += await self._front(server)
        self.remarks.append(f"other programs took {others.share():.0%} of the machine meanwhile")
        return bars

    async def _with_model(self, parts: Sequence[str]) -> list[Bar]:
        bars: list[Bar] = []
        seconds = []
        flags = [word for name, value in MODEL_FLAGS.items() if name not in self._flags for word in (name, value)] + self._flags
        for number in range(self._settings.starts if "start" in parts else 0):
            self._progress(f"start {number + 1}")
            async with Launched(ours(self._model_id, flags)) as server:
                seconds.append(server.ready_seconds)
        if seconds:
            self.details["start_seconds"] = seconds
            bars.append(Bar("start to ready", median(seconds), "≤", 10, "s", f"median of {len(seconds)}"))
        if set(parts) & {"speed", "memory"}:
            async with bare_loop(self._model_id, flags) as bare:
                self.details["bare"] = bare.first["facts"]
                if "speed" in parts:
                    plain = [] if "--speculator" in self._flags else ["--speculator", "none"]  # the bare loop guesses nothing either
                    async with Launched(ours(self._model_id, [*flags, *plain])) as server:
                        bars += await self._speed(server, bare)
                if "memory" in parts:  # of what users start: guesses are on
                    async with Launched(ours(self._model_id, flags)) as server:
                        positions = (await server.metrics())["tgi_batch_max_total_tokens"]
                        bars += await self._memory(server, bare.first["weight_bytes"], int(positions * bare.first["position_bytes"]))
        return bars

    async def _speed(self, server: Launched, bare: Loop) -> list[Bar]:
        rounds: list[dict[str, float]] = []
        self._long = await self._long_prompts(server)
        for number in range(self._settings.rounds):
            self._progress(f"decode and first token, round {number + 1}")
            rounds.append(await self._round(server, bare))
        self.details["speed_rounds"] = rounds

        def middle(name: str) -> float:
            return median(of_round[name] for of_round in rounds)

        def ratio(over: str, under: str) -> float:
            return median(of_round[over] / of_round[under] for of_round in rounds)

        self.remarks.append(
            f"the load generator took {middle('client_cpu_16'):.0%} of a core beside {ROWS} streams, {middle('client_cpu_1'):.0%} beside 1"
        )
        self.remarks.append(
            f"the front took {middle('front_cpu_16'):.0%} of a core beside {ROWS} streams, {middle('front_cpu_1'):.0%} beside 1"
        )
        return [
            Bar("1 stream / bare loop", ratio("http_1", "bare_1"), "≥", 0.9, "", f"{middle('http_1'):.1f} of {middle('bare_1'):.1f} tok/s"),
            Bar(
                f"{ROWS} streams / bare loop",
                ratio("http_16", "bare_16"),
                "≥",
                0.85,
                "",
                f"{middle('http_16'):.0f} of {middle('bare_16'):.0f} tok/s",
            ),
            Bar(
                f"first token of {PROMPT_TOKENS} / bare prefill",
                ratio("http_first", "bare_first"),
                "≤",
                1.5,
                "",
                f"{middle('http_first') * 1000:.1f} over {middle('bare_first') * 1000:.1f} ms",
            ),
        ]

    async def _round(self, server: Launched, bare: Loop) -> dict[str, float]:
        """One value of everything that is compared, taken in turns."""
        found: dict[str, float] = {}
        for streams in (1, ROWS):
            seconds = await bare.decode(streams, PROMPT_TOKENS, self._settings.tokens)
            found[f"bare_{streams}"] = streams * len(seconds) / sum(seconds)
            measured = await self._decode(server, streams)
            found[f"http_{streams}"] = steady_rate(measured.records, streams)
            found[f"client_cpu_{streams}"] = measured.client_cpu / measured.seconds
            found[f"front_cpu_{streams}"] = measured.front_cpu / measured.seconds
        bare_firsts, http_firsts = [], []
        for _ in range(self._settings.firsts):
            bare_firsts += await bare.prefill(PROMPT_TOKENS)
            measured = await self._measure(server, "tgi", Shape(streams=1), Amount(requests=1), Ask(2, prompt_tokens=PROMPT_TOKENS))
            http_firsts += [record.first_token_seconds for record in measured.records]
        return found | {"bare_first": median(bare_firsts), "http_first": median(http_firsts)}

    async def _long_prompts(self, server: Launched) -> list[str]:
        """As many prompts as rows whose greedy answers reach the limit: streams that end early would leave the others a smaller batch.
        Warms the server up, too."""
        ask = Ask(self._settings.tokens, prompt_tokens=PROMPT_TOKENS)
        found: list[str] = []
        for _ in range(SCREENINGS):
            texts = list(itertools.islice(self._texts(ask), ROWS))
            measured = await self._measure(server, "tgi", Shape(streams=ROWS), Amount(requests=ROWS), ask, texts)
            found += [text for text, record in zip(texts, measured.records) if record.tokens == ask.max_new_tokens]
            if len(found) >= ROWS:
                return found[:ROWS]
        raise BenchError(f"of {SCREENINGS * ROWS} answers only {len(found)} have {ask.max_new_tokens} tokens: measure another model")

    async def _decode(self, server: Launched, streams: int) -> Measured:
        ask = Ask(self._settings.tokens, prompt_tokens=PROMPT_TOKENS)
        return await self._measure(server, "tgi", Shape(streams=streams), Amount(requests=streams), ask, self._long)

    async def _measure(
        self, server: Launched, api: str, shape: Shape, amount: Amount, ask: Ask, texts: Iterable[str] | None = None
    ) -> Measured:
        """Without `texts`: prompts nobody has sent before. Raises BenchError when a request failed: a figure of a run with errors says
        nothing."""
        load = Load(Target(server.origin, APIS[api]), ask, iter(texts or self._texts(ask)), self._progress)
        client, front = process.own_cpu_seconds(), process.cpu_seconds(server.front)
        records = await load.run(shape, amount)
        client, front = process.own_cpu_seconds() - client, process.cpu_seconds(server.front) - front
        errors = {record.error for record in records if record.error}
        if errors:
            raise BenchError(f"requests failed: {'; '.join(sorted(errors))}")
        return Measured(records, client, front, max(record.ended for record in records) - records[0].due)

    def _texts(self, ask: Ask) -> Iterator[str]:
        """A little longer than what they are cut to; different at every call."""
        self._seed += 1
        return prompts.synthetic(ask.prompt_tokens + 8, self._seed)

    async def _memory(self, server: Launched, weight_bytes: int, pool_bytes: int) -> list[Bar]:
        """Full batches whose answers are long enough to be guessed at, then many short requests."""
        settings = self._settings
        guessed = Ask(settings.tokens, prompt_tokens=PROMPT_TOKENS)
        await self._measure(server, "tgi-whole", Shape(streams=ROWS), Amount(requests=2 * ROWS), guessed)
        ask = Ask(2, prompt_tokens=8)
        tenth = Amount(max(1, settings.soak_requests // 10), settings.soak_seconds / 10)
        rest = Amount(settings.soak_requests - tenth.requests, settings.soak_seconds * 9 / 10)
        await self._measure(server, "tgi-whole", Shape(streams=ROWS), tenth, ask)
        early = process.resident_bytes(server.front), process.resident_bytes(server.worker)
        sent = len((await self._measure(server, "tgi-whole", Shape(streams=ROWS), rest, ask)).records)
        front, worker = process.resident_bytes(server.front), process.resident_bytes(server.worker)
        verified = sum(value for name, value in (await server.metrics()).items() if name.startswith("forerun_drafted_tokens_total"))
        sizes = {"early": early, "late": (front, worker), "weights": weight_bytes, "pool": pool_bytes}
        self.details["memory"] = sizes | {"requests": sent, "guesses": verified}
        allowed = weight_bytes + pool_bytes + 500 * MB
        note = f"weights {weight_bytes / MB:.0f} + KV {pool_bytes / MB:.0f} + 500; {verified:,.0f} guesses were verified"
        over = f"over {sent} requests, after the first tenth"
        return [
            Bar("memory of the front", front / MB, "≤", 150, "MB"),
            Bar("memory of the worker", worker / MB, "≤", round(allowed / MB), "MB", note),
            Bar("growth of the front", (front - early[0]) / MB, "≤", 10, "MB", over),
            Bar("growth of the worker", (worker - early[1]) / MB, "≤", 10, "MB", over),
        ]

    async def _front(self, server: Launched) -> list[Bar]:
        settings = self._settings
        stream = Ask(settings.front_tokens, prompt_tokens=16)
        short = Ask(1, prompt_tokens=8)
        await self._measure(server, "tgi", Shape(streams=FRONT_STREAMS), Amount(requests=FRONT_STREAMS), stream)
        streamed, shorts = [], []
        for number in range(settings.front_rounds):
            self._progress(f"the front alone, round {number + 1}")
            streamed.append(await self._measure(server, "tgi", Shape(streams=FRONT_STREAMS), Amount(requests=4 * FRONT_STREAMS), stream))
            shorts.append(await self._measure(server, "tgi-whole", Shape(streams=32), Amount(seconds=settings.short_seconds), short))
        events = [sum(len(record.arrivals) for record in run.records) for run in streamed]
        each = [run.front_cpu / count * 1e6 for run, count in zip(streamed, events)]
        a_second = [len(run.records) / run.seconds for run in shorts]
        a_core_second = [len(run.records) / run.front_cpu for run in shorts]
        self.details["front"] = {"event_us": each, "short_a_second": a_second, "short_a_core_second": a_core_second}
        client = median(run.client_cpu / count * 1e6 for run, count in zip(streamed, events))
        busy = median(run.client_cpu / run.seconds for run in shorts)
        wall = median(count / run.seconds for run, count in zip(streamed, events))
        self.remarks.append(f"the load generator took {client:.1f} µs a streamed event, and {busy:.0%} of a core beside short requests")
        return [
            Bar(f"front, a streamed token at {FRONT_STREAMS} streams", median(each), "≤", 15, "µs CPU", f"{wall:,.0f} events/s together"),
            Bar(
                "short requests the front can serve",
                median(a_core_second),
                "≥",
                2000,
                "/s of one core",
                f"{median(a_second):,.0f}/s here, with client and worker on the same cores",
            ),
        ]
