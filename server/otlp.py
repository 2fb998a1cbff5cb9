"""Traces by OpenTelemetry, as TGI exports them: a span for each request, below it where its time went.

    generate_stream                          parameters, total_time, …, seed as in TGI; status; the caller's `traceparent` is its parent
    ├── validation   arrival → queue
    ├── queue        queue → first step
    ├── prefill      first step → first token        prompt tokens, those found in the prefix cache
    └── decode       first token → last              tokens, steps, guesses and those that held, why it ended

Imported only when there is an endpoint: the packages are an extra. Spans are made when their request is over and sent by a thread of the
library, so a collector that is slow or dead costs requests nothing; it is told once in the log when it begins and once when it is over.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from urllib.parse import SplitResult, urlsplit

import structlog
from aiohttp import web
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from forerun import __version__
from forerun.server.errors import ApiError
from forerun.server.identity import REQUEST_ID
from forerun.server.telemetry import Ended, Handler

SEND_SECONDS = 5
"""one try of the exporter"""
CLOSE_SECONDS = 3.0
BATCH_MILLISECONDS = 1000

_log = structlog.get_logger("forerun.traces")


def exporter(endpoint: str) -> SpanExporter:
    """gRPC, as TGI's, for an address alone (`http://collector:4317`); HTTP with protobuf for one with a path
    (`http://collector:4318/v1/traces`). Raises ValueError for what is no address, ImportError when the package is missing."""
    parts = _address(endpoint)
    if parts is None:
        raise ValueError(
            f"`otlp_endpoint` {shown(endpoint)} is not an address such as http://collector:4317 or http://collector:4318/v1/traces"
        )
    if parts.path.strip("/"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=parts.geturl(), timeout=SEND_SECONDS)
    if "@" in parts.netloc:
        raise ValueError("`otlp_endpoint` has a user name or password, which gRPC has no place for: use OTEL_EXPORTER_OTLP_HEADERS")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

    return Grpc(endpoint=parts.geturl(), insecure=parts.scheme == "http", timeout=SEND_SECONDS)


def _address(endpoint: str) -> SplitResult | None:
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        return parts if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 else None
    except ValueError:  # half an IPv6 address, or a port that is no number
        return None


def shown(endpoint: str) -> str:
    """For logs and messages: without user name and password, wherever they end."""
    scheme, mark, rest = endpoint.rpartition("://")
    *hidden, address = rest.rsplit("@", 1)
    return f"{scheme}{mark}{'***@' if hidden else ''}{address}"


class Reporting(SpanExporter):
    """An exporter that says in our log when it begins to fail and when it works again; the library would say so at every try. `lost`:
    spans that did not arrive, in all; those that a full queue dropped are not among them, since the library tells nobody."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self.lost = 0
        self._inner = inner
        self._endpoint = shown(endpoint)
        self._lost_before = 0
        """while everything arrived"""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def export(self, spans: Many[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:  # whatever it raises would end the library's thread
            result = SpanExportResult.FAILURE
            _log.debug("The exporter raised", error=repr(error))
        missing = self.lost - self._lost_before
        if result is not SpanExportResult.SUCCESS:
            if not missing:
                _log.warning("Traces do not arrive; requests are not affected", endpoint=self._endpoint)
            self.lost += len(spans)
        elif missing:
            _log.info("Traces arrive again", endpoint=self._endpoint, lost_spans=missing)
            self._lost_before = self.lost
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class OtlpTracing:
    """A `Tracing`. `sink`: where spans go; `lost`: how many of them it lost."""

    def __init__(self, sink: SpanExporter, service: str, lost: Callable[[], int] = lambda: 0) -> None:
        self.lost = lost
        resource = Resource.create({"service.name": service, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(sink, schedule_delay_millis=BATCH_MILLISECONDS))
        self._tracer = self._provider.get_tracer("forerun", __version__)
        self._parents = TraceContextTextMapPropagator()

    def around(self, name: str, handler: Handler) -> Handler:
        async def traced(http: web.Request) -> web.StreamResponse:
            parent = self._parents.extract({key.lower(): value for key, value in http.headers.items()})
            known = {"http.request.method": http.method, "url.path": http.path, "request_id": http[REQUEST_ID]}
            span = self._tracer.start_span(name, parent, SpanKind.SERVER, known)
            with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
                try:
                    response = await handler(http)
                except ApiError as error:
                    span.set_attributes({"http.response.status_code": error.status, "error.type": error.kind})
                    span.set_status(StatusCode.ERROR, error.message)
                    raise
                except BaseException as error:
                    span.set_attribute("error.type", type(error).__name__)
                    span.set_status(StatusCode.ERROR, "the client left" if _left(error) else str(error))
                    raise
                span.set_attribute("http.response.status_code", response.status)
                return response

        return traced

    def answered(self, ended: Ended) -> None:
        sequence, request = ended.sequence, ended.sequence.request
        trace.get_current_span().set_attributes({**ended.facts, "input_tokens": len(request.tokens), "generated_tokens": ended.generated})
        first = sequence.first_token_at or ended.ended
        started = sequence.started_at or first
        edges = request.arrived, sequence.queued_at, started, first, ended.ended
        known = {"input_tokens": len(request.tokens), "cached_tokens": sequence.prefix_hit_tokens}
        guesses: dict[str, AttributeValue] = {"steps": ended.steps, "drafted": ended.drafted, "accepted": ended.accepted}
        made = {"generated_tokens": ended.generated, **guesses, "finish_reason": ended.finish}
        self._below(edges, [("validation", {}), ("queue", {"preemptions": sequence.preemptions}), ("prefill", known), ("decode", made)])

    def failed(self, kind: str, message: str) -> None:
        span = trace.get_current_span()
        span.set_attribute("error.type", kind)
        span.set_status(StatusCode.ERROR, message)

    def close(self) -> None:
        """In a thread of its own, since the library waits for a dead collector for longer than anybody wants to."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _below(self, edges: Many[float], parts: Many[tuple[str, Mapping[str, AttributeValue]]]) -> None:
        """Below the current span, parts between these monotonic times, which the clock on the wall is read once for."""
        clock = time.time_ns() - round(time.monotonic() * 1e9)
        times = [clock + round(edge * 1e9) for edge in edges]
        for (name, attributes), began, ended in zip(parts, times, times[1:]):
            self._tracer.start_span(name, attributes=attributes, start_time=began).end(ended)


def _left(error: BaseException) -> bool:
    return isinstance(error, asyncio.CancelledError | ConnectionError)
