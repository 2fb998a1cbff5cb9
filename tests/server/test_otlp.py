"""Traces: what spans a request becomes, that they arrive over both protocols, and that a dead collector is nobody's problem."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from structlog.testing import capture_logs

from forerun import launch
from forerun.config import Config
from forerun.launch import Failed
from forerun.router.request import Failure
from forerun.server import otlp
from forerun.server.otlp import OtlpTracing, Reporting, exporter
from tests.server.front import runs, serve, stuck, until

PARTS = ["validation", "queue", "prefill", "decode"]
ASK = {"inputs": "hello", "parameters": {"max_new_tokens": 4, "details": True}}


class Spans:
    """What a server with traces was heard to say."""

    def __init__(self) -> None:
        self._sink = InMemorySpanExporter()
        self.tracing = OtlpTracing(self._sink, "mine")

    def all(self) -> dict[str, ReadableSpan]:
        self.tracing.close()
        return {span.name: span for span in self._sink.get_finished_spans()}


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_request_is_a_span_and_its_times_are_spans_below(path: str) -> None:
    spans = Spans()
    async with serve(script=runs([1], [2, 3], [4]), tracing=spans.tracing) as front:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
        response, _ = await front.raw(path, ASK, headers={"traceparent": parent, "x-request-id": "mine-1"})
        assert response.status == 200
    found = spans.all()
    top = found[path[1:]]
    assert found.keys() == {path[1:], *PARTS}
    assert f"{top.context.trace_id:032x}" == parent.split("-")[1], "also of a trace that the caller does not sample, as in TGI"
    assert top.parent is not None and f"{top.parent.span_id:016x}" == parent.split("-")[2]
    assert top.resource.attributes["service.name"] == "mine" and top.status.status_code is StatusCode.UNSET
    told = dict(top.attributes or {})
    assert told["request_id"] == "mine-1" and told["http.response.status_code"] == 200
    assert told.keys() >= {"parameters", "total_time", "validation_time", "queue_time", "inference_time", "time_per_token", "seed"}
    assert (told["input_tokens"], told["generated_tokens"]) == (1, 4)
    edges = [(found[name].start_time, found[name].end_time) for name in PARTS]
    assert all(found[name].parent.span_id == top.context.span_id for name in PARTS)
    assert all(begun <= ended for begun, ended in edges)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges)), "each begins where the one before it ends"
    decode = dict(found["decode"].attributes or {})
    assert decode["generated_tokens"] == 4 and (decode["steps"], decode["drafted"], decode["accepted"]) == (3, 4, 1)
    assert decode["finish_reason"] == "length"


async def test_refusals_and_failures_are_errors_of_their_span() -> None:
    spans = Spans()
    async with serve(script=runs([1], failure=Failure("worker lost", "generation", 424)), tracing=spans.tracing) as front:
        await front.post("/generate", {"inputs": ""})
        await front.raw("/generate_stream", ASK)
    found = spans.all()
    assert found.keys() == {"generate", "generate_stream"}
    for name, kind in (("generate", "validation"), ("generate_stream", "generation")):
        assert found[name].status.status_code is StatusCode.ERROR
        assert dict(found[name].attributes or {})["error.type"] == kind


async def test_a_client_that_leaves() -> None:
    spans = Spans()
    async with serve(script=stuck, step_seconds=0.01, tracing=spans.tracing) as front:
        asking = asyncio.create_task(front.raw("/generate", ASK))
        await until(lambda: front.router.running > 0, 60)
        asking.cancel()
        await front.settled()
    assert spans.all()["generate"].status.description == "the client left"


async def test_requests_do_not_mix_their_spans() -> None:
    spans = Spans()
    async with serve(step_seconds=0.002, tracing=spans.tracing) as front:
        ids = [f"{n:032x}" for n in range(1, 9)]
        headers = [{"traceparent": f"00-{one}-b7ad6b7169203331-01"} for one in ids]
        await asyncio.gather(*(front.raw("/generate_stream", ASK, headers=one) for one in headers))
    spans.tracing.close()
    traces = [f"{span.context.trace_id:032x}" for span in spans._sink.get_finished_spans()]
    assert {one: traces.count(one) for one in set(traces)} == dict.fromkeys(ids, 1 + len(PARTS))


async def test_a_client_that_sends_nonsense_for_a_parent_gets_a_trace_of_its_own() -> None:
    spans = Spans()
    async with serve(tracing=spans.tracing) as front:
        assert (await front.raw("/generate", ASK, headers={"traceparent": "00-zz-" + "9" * 9000}))[0].status == 200
    assert spans.all()["generate"].parent is None


class Collector:
    """The requests that a collector got, over either protocol."""

    def __init__(self) -> None:
        self.got: list[ExportTraceServiceRequest] = []

    def names(self) -> set[str]:
        return {span.name for one in self.got for resource in one.resource_spans for scope in resource.scope_spans for span in scope.spans}

    def services(self) -> set[str]:
        attributes = [item for one in self.got for resource in one.resource_spans for item in resource.resource.attributes]
        return {item.value.string_value for item in attributes if item.key == "service.name"}


@contextmanager
def over_grpc() -> Iterator[tuple[str, Collector]]:
    collector = Collector()

    def export(request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        collector.got.append(request)
        return ExportTraceServiceResponse()

    method = grpc.unary_unary_rpc_method_handler(export, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString)
    server = grpc.server(ThreadPoolExecutor(1))
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        server.stop(None).wait()


@contextmanager
def over_http() -> Iterator[tuple[str, Collector]]:
    collector = Collector()

    class Post(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.got.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Post)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("protocol", [over_grpc, over_http])
async def test_spans_arrive(protocol: Any) -> None:
    with protocol() as (endpoint, collector):
        flags = ["--model-id", "tiny", "--otlp-endpoint", endpoint, "--otlp-service-name", "mine"]
        tracing = launch._tracing(Config.parse(flags, {}))
        async with serve(tracing=tracing) as front:
            await front.raw("/generate_stream", ASK)
        await asyncio.to_thread(tracing.close)
        assert collector.names() == {"generate_stream", *PARTS}
        assert collector.services() == {"mine"}


class Broken(SpanExporter):
    """Fails, in both of the ways that exporters have, until it is mended."""

    def __init__(self) -> None:
        self.tries = 0
        self.mended = False

    def export(self, spans: Any) -> SpanExportResult:
        self.tries += 1
        if self.mended:
            return SpanExportResult.SUCCESS
        if self.tries % 2:
            raise OSError("no route")
        return SpanExportResult.FAILURE


def test_a_dead_collector_is_a_line_in_the_log_and_so_is_its_return() -> None:
    broken = Broken()
    reporting = Reporting(broken, "http://collector:4317")
    with capture_logs() as lines:
        for _ in range(5):
            assert reporting.export([object(), object()]) is SpanExportResult.FAILURE  # type: ignore[list-item]
        broken.mended = True
        assert reporting.export([object()]) is SpanExportResult.SUCCESS  # type: ignore[list-item]
    told = [(line["log_level"], line["event"]) for line in lines if line["log_level"] != "debug"]
    assert told == [("warning", "Traces do not arrive; requests are not affected"), ("info", "Traces arrive again")]
    assert lines[-1]["lost_spans"] == 10
    broken.mended = False
    with capture_logs() as lines:
        reporting.export([object()])  # type: ignore[list-item]
        broken.mended = True
        reporting.export([object()])  # type: ignore[list-item]
    assert lines[-1]["lost_spans"] == 1 and reporting.lost == 11


async def test_lost_spans_are_counted_among_the_metrics() -> None:
    reporting = Reporting(Broken(), "http://collector:4317")  # type: ignore[arg-type]
    async with serve(tracing=OtlpTracing(reporting, "mine", lambda: reporting.lost)) as front:
        reporting.export([object()] * 7)  # type: ignore[list-item]
        assert b"\nforerun_traces_lost_spans_total 7\n" in (await front.get("/metrics"))[1]


SECRETS = [
    ("http://me:pass@word@collector:4318/v1/traces", "http://***@collector:4318/v1/traces"),
    ("me:word@collector:4318/v1/traces", "***@collector:4318/v1/traces"),
    ("https://collector:4317", "https://collector:4317"),
    ("collector:4317", "collector:4317"),
]


@pytest.mark.parametrize(("endpoint", "public"), SECRETS)
def test_passwords_in_the_address_are_in_no_log(endpoint: str, public: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.1)
    with capture_logs() as lines:
        tracing = launch._tracing(Config.parse(["--model-id", "tiny", "--otlp-endpoint", endpoint], {}))
        reporting = Reporting(Broken(), endpoint)  # type: ignore[arg-type]
        reporting.export([object()])  # type: ignore[list-item]
    tracing.close()
    told = [line["endpoint"] for line in lines if "endpoint" in line]
    assert told == [public, public] and "word" not in str(lines)


@pytest.mark.parametrize("endpoint", ["http://me:word@collector:4317", "ftp://me:word@x"])
def test_passwords_are_in_no_error(endpoint: str) -> None:
    with pytest.raises(Failed) as failure:
        launch._tracing(Config.parse(["--model-id", "tiny", "--otlp-endpoint", endpoint], {}))
    assert "word@" not in str(failure.value) + failure.value.cure


async def test_requests_do_not_notice_a_dead_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.1)
    tracing = OtlpTracing(Reporting(exporter("http://127.0.0.1:9"), "http://127.0.0.1:9"), "mine")
    async with serve(tracing=tracing) as front:
        for _ in range(20):
            assert (await front.raw("/generate", ASK))[0].status == 200
    await asyncio.wait_for(asyncio.to_thread(tracing.close), 30)


@pytest.mark.parametrize(
    "endpoint",
    ["ftp://x", "http://", "http:///v1/traces", "nonsense://collector:1", "http://collector:otlp", "collector:99999", "http://[::1"],
)
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(Failed, match="is not an address such as"):
        launch._tracing(Config.parse(["--model-id", "tiny", "--otlp-endpoint", endpoint], {}))


def test_without_the_package_the_start_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "forerun.server.otlp")
    with pytest.raises(Failed) as failure:
        launch._tracing(Config.parse(["--model-id", "tiny"], {"OTLP_ENDPOINT": "http://collector:4317"}))
    assert "pip install 'forerun[otlp]'" in failure.value.cure


def test_without_an_endpoint_the_package_is_not_even_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "forerun.server.otlp")
    tracing = launch._tracing(Config.parse(["--model-id", "tiny"], {}))
    assert tracing.around("generate", until) is until  # type: ignore[arg-type]
