"""`forerun draft-server`: guesses for workers in other processes or on other machines.

    forerun draft-server --model-id DRAFT --target TARGET --port 9001           a model drafts (or --speculator suffix)
    forerun serve --model-id TARGET --speculator remote=http://HOST:9001

or, with a model of your own in any framework, `serve(guess, tokenizer)` from Python. One service drafts for any number of workers with
its tokenizer. Owns the network: requests, one thread that drafts, and the idle time in which it drafts ahead.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import msgspec
from aiohttp import web

from forerun.backends.registry import open_backend
from forerun.drafting import ASK, HELLO, Answer, Ask, Hello, Welcome, fingerprint
from forerun.engine.drafters.draft import Drafter, Place
from forerun.engine.drafters.model import MOST, Companion
from forerun.engine.drafters.registry import Host, Setting, open_drafter
from forerun.engine.drafters.vocabulary import match, texts
from forerun.engine.draftservice import IDLE_SECONDS, DraftService, Refused, Written
from forerun.engine.errors import StartError
from forerun.engine.kv import Table
from forerun.engine.models.load import find, load_model
from forerun.engine.models.model import Model
from forerun.messages import Start

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 24
"""of a question"""
COUNTERS = frozenset({"asked", "at_once", "turned_away"})
"""facts that only grow"""


class Server:
    """A service behind HTTP: `app` for aiohttp."""

    def __init__(self, service: DraftService) -> None:
        self._service = service
        self._drafting = ThreadPoolExecutor(1, "drafting")
        self._waiting = 0
        self._hellos = msgspec.msgpack.Decoder(Hello)
        self._asks = msgspec.msgpack.Decoder(Ask)
        self.app = web.Application(client_max_size=MOST_BYTES)
        self.app.cleanup_ctx.append(self._housekeeping)
        self.app.add_routes([web.post(HELLO, self._hello), web.post(ASK, self._ask)])
        self.app.add_routes([web.get("/health", self._health), web.get("/metrics", self._metrics)])

    async def _hello(self, request: web.Request) -> web.Response:
        data = await request.read()
        return await self._answer(lambda: self._service.hello(self._hellos.decode(data)))

    async def _ask(self, request: web.Request) -> web.Response:
        data = await request.read()
        try:
            ask = self._asks.decode(data)
        except msgspec.MsgspecError as wrong:
            return web.Response(status=400, text=str(wrong))
        response = await self._answer(lambda: self._service.ask(ask))
        if response.status == 200 and not self._waiting:
            asyncio.get_running_loop().run_in_executor(self._drafting, self._ahead, ask)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.facts)

    async def _metrics(self, request: web.Request) -> web.Response:
        """The same for Prometheus."""
        lines: list[str] = []
        for name, value in self._service.facts.items():
            if name != "drafter":
                kind, full = ("counter", f"forerun_draft_{name}_total") if name in COUNTERS else ("gauge", f"forerun_draft_{name}")
                lines += f"# TYPE {full} {kind}", f"{full} {value}"
        return web.Response(text="\n".join([*lines, ""]))

    async def _housekeeping(self, app: web.Application) -> AsyncIterator[None]:
        """What nobody asks about any more is forgotten, also when nobody asks at all."""

        async def expire() -> None:
            while True:
                await asyncio.sleep(IDLE_SECONDS / 4)
                await asyncio.get_running_loop().run_in_executor(self._drafting, self._service.expire)

        task = asyncio.get_running_loop().create_task(expire())
        yield
        task.cancel()

    async def _answer(self, work: Callable[[], Welcome | Answer]) -> web.Response:
        self._waiting += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._drafting, work)
        except msgspec.MsgspecError as wrong:
            return web.Response(status=400, text=str(wrong))
        except Refused as refused:
            return web.Response(status=409, body=msgspec.msgpack.encode(refused.refusal))
        finally:
            self._waiting -= 1
        return web.Response(body=msgspec.msgpack.encode(answer), content_type="application/msgpack")

    def _ahead(self, ask: Ask) -> None:
        """Unless somebody asks already."""
        if not self._waiting:
            try:
                self._service.draft_ahead(ask)
            except Exception:
                log.exception("drafting ahead failed")


def serve(
    guess: Callable[[list[int], int], Sequence[int]],
    tokenizer: str | Path,
    host: str = "127.0.0.1",
    port: int = 9001,
    most: int = 16,
    rows: int = 64,
) -> None:
    """Serve an application's own drafts until interrupted. `guess(text, most)`: up to `most` token ids that may follow the ids in `text`.
    `tokenizer`: a folder with the tokenizer.json that both have. `rows`: sequences at a time; more go without guesses."""
    known = texts(Path(tokenizer))
    name = getattr(guess, "__name__", "a function")
    service = DraftService(Written(guess, most), name, len(known), fingerprint(known), rows, longest=1 << 17)
    web.run_app(Server(service).app, host=host, port=port, print=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """All that a draft model asks of a target that is elsewhere."""

    vocab: int


def open_service(model_id: str, speculator: str, rows: int, longest: int, most: int, threads: int, target: str = "") -> DraftService:
    """A model's folder drafts (`speculator` "model"), or a look-up, in the tokens of `target`, a folder with its tokenizer; "" = the
    model's own. StartError says what is wrong, and the cure."""
    start = Start(model_id=model_id, max_rows=rows, threads=threads)
    theirs = find(Start(model_id=target or model_id))
    known = texts(theirs)
    if speculator != "model":
        drafter = open_drafter(speculator, Setting(nodes=most))
        return DraftService(drafter, speculator, len(known), fingerprint(known), rows, longest)
    backend = open_backend(start.device, threads, start.memory_fraction)
    model = load_model(start, backend, lambda stage, done, total: None)
    host = Host(start, backend, cast(Model, Words(len(known))), lambda stage, done, total: None)
    companion: Drafter = Companion(model, match(theirs, find(start), len(known), model.vocab), host, most, True)
    longest = min(longest, model.max_tokens)
    size = backend.caps.page_tokens
    each = -(-(longest + most) // size)
    needed = rows * each * size * sum(spec.position_bytes for spec in companion.needs.pools)
    free = backend.memory()[0] - companion.needs.work_bytes
    if needed > free:
        raise StartError(
            f"{rows} sequences of {longest} tokens need {needed >> 20} MB for KV, {max(0, free) >> 20} MB are free",
            "lower --rows or --max-total-tokens",
        )
    table = Table(rows, longest + most, size)
    for row in range(rows):
        table.grant(row, range(row * each, (row + 1) * each))
    pools = tuple(backend.pool(spec, rows * each) for spec in companion.needs.pools)
    companion.needs.attach(Place(pools, table, rows, longest))
    return DraftService(companion, model_id, len(known), fingerprint(known), rows, longest)


def _count(text: str) -> int:
    """Of what there must be some."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """0 ended, 1 could not start, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="forerun draft-server", description="Guesses for workers elsewhere.", allow_abbrev=False)
    parser.add_argument(
        "--model-id", required=True, help="the draft model; with --speculator suffix any folder with the target's tokenizer"
    )
    parser.add_argument("--target", default="", help="a folder with the targets' tokenizer.json, where the draft's is another")
    parser.add_argument("--speculator", default="model", choices=["model", "suffix", "ngram"], help="who guesses (default: %(default)s)")
    parser.add_argument("--hostname", default="127.0.0.1", help="(default: %(default)s; whoever reaches it may read no text but send any)")
    parser.add_argument("--port", type=int, default=9001, help="(default: %(default)s)")
    parser.add_argument("--rows", type=_count, default=32, help="sequences it drafts for; more get none (default: %(default)s)")
    parser.add_argument(
        "--max-total-tokens", type=_count, default=2048, help="of a sequence; longer ones get no guesses (default: %(default)s)"
    )
    parser.add_argument("--speculate", type=_count, default=2 * MOST, help="most guesses of a sequence (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="compute threads (default: as many as a server takes)")
    asked = parser.parse_args(argv)
    try:
        service = open_service(
            asked.model_id, asked.speculator, asked.rows, asked.max_total_tokens, asked.speculate, asked.threads, asked.target
        )
    except StartError as wrong:
        print(f"forerun draft-server: {wrong}", file=sys.stderr)
        return 1
    print(f"drafting with {asked.model_id} ({asked.speculator}) on http://{asked.hostname}:{asked.port}", file=sys.stderr, flush=True)
    try:
        web.run_app(Server(service).app, host=asked.hostname, port=asked.port, print=None)
    except OSError as wrong:
        print(f"forerun draft-server: {wrong}; choose another --hostname or --port", file=sys.stderr)
        return 1
    return 0
