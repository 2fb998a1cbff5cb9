"""From a configuration to a server that runs and, one day, ends in order.

Owns the process: the event loop, the port, the signals, and the exit code. Knows nothing of requests (server) and steps (router).

    port open ──▶ fetch what is not here ──▶ tokenizer and worker load, side by side ──▶ ready ──signal──▶ drain ──▶ exit 0
                     └── cannot be fetched or loaded: reason and cure on standard error, exit 1        second signal: now
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog
import uvloop
from aiohttp import web

from forerun.config import Config
from forerun.download import DownloadError, download
from forerun.hub import ModelNotFound, locate, must_fetch
from forerun.messages import Progress, Ready, Start
from forerun.router.service import Router
from forerun.server.app import Services, build_app, make_runner
from forerun.server.grammar import GrammarReader
from forerun.server.telemetry import NoTracing, Tracing
from forerun.server.text import Tokenizer, TokenizerError, tokenizer_file

BACKLOG = 1024
MOST_ROWS = 256
"""sequences running at once when --max-batch-size does not say"""
FAILED_SECONDS = 5.0
"""How long a server that cannot generate any more stays to say so (health, error events) before it exits for a supervisor to restart it."""
DOWNLOAD_LOG_SECONDS = 5.0
OPEN_FILES = 65536
YOUNG_OBJECTS = 10_000
"""A step of 64 streams makes a thousand objects that die with it: the collector need not look at them every time."""

_log = structlog.get_logger("forerun.launch")
T = TypeVar("T")


class Failed(Exception):
    """The server cannot start or go on. `cure`: what the operator can do."""

    def __init__(self, reason: str, cure: str = "") -> None:
        super().__init__(reason)
        self.cure = cure


def run(config: Config) -> int:
    """Serve until a signal or a failure. Returns the exit code: 0 after a signal, 1 after a failure (with the reason on standard error)."""
    try:
        uvloop.run(Server(config).serve())
    except Failed as failure:
        _log.error("Stopped", reason=str(failure), cure=failure.cure)
        print(f"error: {failure}" + (f"\n  cure: {failure.cure}" if failure.cure else ""), file=sys.stderr)
        return 1
    return 0


def start_message(config: Config) -> Start:
    """What a worker is told: all it needs to load the model and to size itself."""
    model, batching, sampling = config.model, config.batching, config.sampling
    return Start(
        model_id=model.model_id,
        revision=model.revision,
        device=config.device.device,
        dtype=model.dtype,
        quantize=model.quantize,
        kv_dtype=model.kv_cache_dtype,
        threads=config.device.threads,
        max_rows=batching.max_batch_size or min(config.limits.max_concurrent_requests, MOST_ROWS),
        max_total_tokens=config.limits.max_total_tokens or 0,
        max_step_tokens=batching.max_batch_prefill_tokens or 0,
        max_pool_tokens=batching.max_batch_total_tokens or 0,
        memory_fraction=config.device.cuda_memory_fraction,
        hub_cache=model.huggingface_hub_cache or None,
        trust_remote_code=model.trust_remote_code,
        allow_pickle=model.allow_pickle,
        rope_scaling=model.rope_scaling,
        rope_factor=model.rope_factor,
        watermark_gamma=sampling.watermark_gamma,
        watermark_delta=sampling.watermark_delta,
        speculator=config.speculation.speculator,
        speculate=config.speculation.speculate or 0,
        acceptance=config.speculation.acceptance,
        echo=config.testing.echo,
        test_faults=config.testing.test_faults,
    )


class Server:
    """One run of the server."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._began = time.monotonic()
        self._signals: list[str] = []
        self._signalled = asyncio.Event()
        self._insisted = asyncio.Event()

    async def serve(self) -> None:
        """Returns after a signal. Raises Failed."""
        self._hear_signals()
        _allow_many_connections()
        services = Services(grammars=GrammarReader(self._config.worker_environment()), tracing=_tracing(self._config))
        router = Router(self._config, start_message(self._config), services.metrics.batch, self._config.worker_environment())
        runner = make_runner(build_app(self._config, router, services))
        await runner.setup()
        try:
            await self._listen(runner)
            await self._live(router, services)
        finally:
            await router.drain(0)
            await runner.cleanup()
            await router.close()
            await asyncio.to_thread(services.tracing.close)
            if services.tokenizer is not None:
                services.tokenizer.close()

    def _hear_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number.name)
        (self._insisted if self._signalled.is_set() else self._signalled).set()
        _log.info(f"Received {number.name}", then="ending now" if self._insisted.is_set() else "finishing what runs")

    async def _listen(self, runner: web.AppRunner) -> None:
        serving = self._config.serving
        try:
            await web.TCPSite(runner, serving.hostname, serving.port, backlog=BACKLOG).start()
        except OSError as error:
            raise Failed(
                f"cannot listen on {serving.hostname}:{serving.port}: {error.strerror or error}",
                "stop the process that has the port, or choose another with --port",
            ) from error
        self._address = _url(runner.addresses[0])
        _log.info("Listening, loading the model", address=self._address, model_id=self._config.model.model_id)

    async def _live(self, router: Router, services: Services) -> None:
        """Load, serve, and drain."""
        tasks = [
            asyncio.create_task(self._signalled.wait()),
            asyncio.create_task(router.failed.wait()),
            asyncio.create_task(self._load(router, services)),
        ]
        signalled, failed, loading = tasks
        try:
            await asyncio.wait((signalled, failed, loading), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                await asyncio.wait((signalled, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                await self._fail(router, served=loading.done())
            await self._drain(router)
        finally:
            for task in tasks:
                task.cancel()

    async def _load(self, router: Router, services: Services) -> None:
        """Returns when the first request can be answered. Raises Failed."""
        if not self._config.model.hf_hub_offline:
            await self._fetch(router)
        try:
            file = _tokenizer_file(self._config)
            if file is not None and not file.is_file():  # the worker finds it when it has been made
                services.tokenizer = await _in_a_thread(lambda: _tokenizer(self._config))
            router.open(str(file or ""))
            services.tokenizer = services.tokenizer or await _in_a_thread(lambda: _tokenizer(self._config))
        except ModelNotFound as error:
            offline = "HF_HUB_OFFLINE is set, so nothing was downloaded" if self._config.model.hf_hub_offline else ""
            raise Failed(str(error), offline) from error
        except TokenizerError as error:
            raise Failed(str(error)) from error
        await router.became_ready.wait()
        # What starting left behind lives as long as the process: the collector need not walk it while tokens are waiting.
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        self._announce(router)

    async def _fetch(self, router: Router) -> None:
        """Into the hub cache, what a hub id names and the cache does not hold."""
        model = self._config.model
        parts = ["weights", *["pickles"] * model.allow_pickle, *["code"] * model.trust_remote_code]
        wanted = [(model.model_id, model.revision, parts if not self._config.testing.echo else [])]
        wanted += [(model.tokenizer_name, None, parts[1:])] if model.tokenizer_name else []
        logged = 0.0

        def report(done: int, total: int) -> None:
            nonlocal logged
            router.prelude = Progress("downloading", done, total)
            if done == total or time.monotonic() - logged >= DOWNLOAD_LOG_SECONDS:
                logged = time.monotonic()
                _log.info("Downloading", model_id=name, done=_mib(done), total=_mib(total))

        for name, revision, what in wanted:
            if name and must_fetch(name, revision, model.huggingface_hub_cache, "weights" in what):
                try:
                    await download(name, revision, model.huggingface_hub_cache, what, self._config.worker_environment(), report)
                except DownloadError as error:
                    raise Failed(str(error), error.cure) from error
        router.prelude = None

    def _announce(self, router: Router) -> None:
        ready, limits = router.ready, router.limits
        assert ready is not None and limits is not None
        _log.info("Memory plan", **_memory(ready), pool_tokens=limits.max_batch_total_tokens)
        _log.info("Worker", device=ready.device, dtype=ready.dtype, speculator=ready.drafter, rows=ready.rows, **ready.facts)
        _log.info(
            f"Connected: ready on {self._address}",
            seconds=round(time.monotonic() - self._began, 2),
            model_id=self._config.model.model_id,
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            max_concurrent_requests=limits.max_concurrent_requests,
        )
        if self._config.logging.hint:
            body = '{"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}'
            print(f"\n  curl {self._address}/generate -H 'Content-Type: application/json' -d '{body}'\n", flush=True)

    async def _fail(self, router: Router, served: bool) -> None:
        """The router gave up: stay for a moment to say so, unless nobody was served yet; then fail."""
        death = router.death
        assert death is not None
        if served:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signalled.wait(), FAILED_SECONDS)
        raise Failed(death.reason, death.cure)

    async def _drain(self, router: Router) -> None:
        """What is there ends in its own time, up to the grace; a second signal ends the wait."""
        grace = self._config.serving.graceful_termination_timeout
        _log.info("Shutting down", because=self._signals[0], grace_seconds=grace, **_busy(router))
        draining = asyncio.create_task(router.drain(grace))
        insisted = asyncio.create_task(self._insisted.wait())
        await asyncio.wait((draining, insisted), return_when=asyncio.FIRST_COMPLETED)
        insisted.cancel()
        draining.cancel()
        _log.info("Stopped", because=self._signals[0], unfinished=_busy(router)["running"])


def _busy(router: Router) -> dict[str, int]:
    load = router.load()
    return {"running": load.running, "waiting": load.waiting}


def _tracing(config: Config) -> Tracing:
    """Raises Failed when traces are asked for and cannot be made."""
    endpoint = config.logging.otlp_endpoint
    if endpoint is None:
        return NoTracing()
    try:
        from forerun.server.otlp import OtlpTracing, Reporting, exporter, shown

        sink = Reporting(exporter(endpoint), endpoint)
        tracing = OtlpTracing(sink, config.logging.otlp_service_name, lambda: sink.lost)
    except ImportError as error:
        raise Failed(
            f"--otlp-endpoint needs OpenTelemetry: {error}", "pip install 'forerun[otlp]', or leave --otlp-endpoint out"
        ) from error
    except ValueError as error:
        raise Failed(str(error), "leave --otlp-endpoint out, or give the collector's address") from error
    _log.info("Traces are sent", endpoint=shown(endpoint), service=config.logging.otlp_service_name)
    return tracing


def _tokenizer(config: Config) -> Tokenizer:
    model = config.model
    folder = locate(model.model_id, model.revision, model.huggingface_hub_cache) if model.model_id else Path()
    return Tokenizer.load(folder, config)


def _tokenizer_file(config: Config) -> Path | None:
    model = config.model
    return tokenizer_file(locate(model.model_id, model.revision, model.huggingface_hub_cache), config) if model.model_id else None


async def _in_a_thread(work: Callable[[], T]) -> T:
    """Run in a thread that does not keep the process alive: whoever interrupts the start is not made to wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name="load", daemon=True).start()
    return await done


def _memory(ready: Ready) -> dict[str, str]:
    return {name: _mib(size) for name, size in ready.memory.items()}


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _url(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_many_connections() -> None:
    """A refused client still holds a connection while it reads its 429: the usual 1024 open files are too few for a burst."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
