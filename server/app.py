"""The HTTP application: which route leads where, what every request passes, and how it is run.

Owns no state of its own: configuration, router and services are handed in (launch.py makes them), and each handler object holds what it
needs. The port answers from the first second; whatever cannot be done yet says so.
"""

from __future__ import annotations

import logging

from aiohttp import http_exceptions, web

from forerun import __version__
from forerun.config import Config
from forerun.router.controller.journal import View
from forerun.router.service import Router
from forerun.server import body, openai_schema, schema, static
from forerun.server.cloud import Cloud, VertexRequest, VertexResponse
from forerun.server.connection import Runner
from forerun.server.desk import Desk
from forerun.server.document import Handler, Operation, document, inference
from forerun.server.edge import Edge
from forerun.server.health import Health
from forerun.server.kserve import KServe
from forerun.server.live import Live, LiveRoute
from forerun.server.native import Native
from forerun.server.openai import OpenAI
from forerun.server.pages import Pages
from forerun.server.services import Services

__all__ = ["Services", "build_app", "make_runner"]

KEEP_ALIVE_SECONDS = 75.0
"""An idle connection is kept for longer than the minute after which the usual proxies drop theirs, so that they never reuse a dead one."""
FINISH_SECONDS = 2.0
"""What open connections get to read their last bytes after the router has drained."""
HEADER_BYTES = 65536
"""longest request line and longest header: tokens and cookies that proxies add pass the library's 8 kB, and TGI takes them"""
NOT_SERVED = ("/v1/{rest:.*}",)


_http_log = logging.getLogger("forerun.http")


def build_app(config: Config, router: Router, services: Services) -> web.Application:
    """The application. `services.tokenizer` may still be None and the router still loading."""
    edge = Edge(config.serving.cors_allow_origin, config.serving.api_key)
    app = web.Application(middlewares=[edge.admit], client_max_size=config.limits.payload_limit)
    app.on_response_prepare.append(edge.sign)
    app.on_cleanup.append(lambda _: services.grammars.close())
    pages = Pages(config, router, services.metrics, services.tracing)
    desk = Desk(config, router, services)
    native = Native(config, desk)
    openai = OpenAI(config, desk)
    live = LiveRoute(config, router, services.metrics)
    health = Health(router, services)
    questions = [*_questions(health, pages, live), *KServe(native, health).operations()]
    operations = [*_inference(native), *_openai(openai), *_cloud(Cloud(native, openai)), *questions]
    pages.document = document(operations, title="Forerun", version=__version__, secured=config.serving.api_key is not None)
    for one in operations:
        if one.method == "POST":
            app.router.add_post(one.path, services.tracing.around(one.name, one.handler), expect_handler=body.expected)
        else:
            app.router.add_get(one.path, one.handler)
    for path in ("/docs", "/docs/"):
        app.router.add_get(path, pages.docs)
    app.router.add_get("/api-doc/openapi.json", pages.openapi)
    for path, handler in (("/dashboard", static.dashboard), ("/dashboard/", static.slash), ("/dashboard/{name}", static.part)):
        app.router.add_get(path, handler)
    for path in NOT_SERVED:
        app.router.add_route("*", path, pages.not_served)
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner of the application, with what a connection may cost."""
    _http_log.addFilter(_is_ours)
    return Runner(
        app,
        shutdown_timeout=FINISH_SECONDS,
        logger=_http_log,
        access_log=None,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
        keepalive_timeout=KEEP_ALIVE_SECONDS,
    )


def _is_ours(record: logging.LogRecord) -> bool:
    """Broken HTTP and clients that leave in the middle are answered or dropped, not logged: anybody can send them as fast as they like."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http_exceptions.HttpProcessingError | web.RequestPayloadError | ConnectionError)


def _inference(native: Native) -> list[Operation]:
    plain, compat, event = schema.GenerateRequest, schema.CompatGenerateRequest, schema.StreamResponse
    one, several, tokens = schema.GenerateResponse, list[schema.GenerateResponse], list[schema.SimpleToken]
    either = "Generate tokens, or a stream of them if `stream`"
    return [
        inference("/", "compat_generate", native.compat, either, compat, answer=several, event=event),
        inference("/generate", "generate", native.generate, "Generate tokens", plain, answer=one),
        inference("/generate_stream", "generate_stream", native.generate_stream, "Generate a stream of tokens", plain, event=event),
        inference("/tokenize", "tokenize", native.tokenize, "Tokenize inputs", plain, answer=tokens),
    ]


def _openai(openai: OpenAI) -> list[Operation]:
    chat, text = openai_schema.ChatRequest, openai_schema.CompletionRequest
    whole, chunk, written = openai_schema.ChatCompletion, openai_schema.ChatChunk, openai_schema.Completion
    return [
        inference(
            "/v1/chat/completions",
            "chat_completions",
            openai.chat_completions,
            "What the assistant says next",
            chat,
            answer=whole,
            event=chunk,
        ),
        inference("/v1/completions", "completions", openai.completions, "Go on with a text", text, answer=written, event=written),
        inference(
            "/chat_tokenize", "chat_tokenize", openai.chat_tokenize, "The prompt of a conversation", chat, answer=openai_schema.ChatTokens
        ),
        Operation("GET", "/v1/models", "openai_get_model_info", openai.models, "The model", answer=openai_schema.Models),
        Operation(
            "GET",
            "/v1/models/{id:.+}",
            "openai_get_model",
            openai.model,
            "The model",
            answer=openai_schema.ModelInfo,
            errors={404: "There is no such model"},
            error=openai_schema.OpenAIErrorResponse,
        ),
    ]


def _cloud(cloud: Cloud) -> list[Operation]:
    bodies = (schema.CompatGenerateRequest, openai_schema.ChatRequest, openai_schema.CompletionRequest)
    answers = (list[schema.GenerateResponse], openai_schema.ChatCompletion, openai_schema.Completion)
    events = (schema.StreamResponse, openai_schema.ChatChunk, openai_schema.Completion)
    summary = "The body of `/`, of a chat or of a completion, answered as there (SageMaker)"
    return [
        inference("/invocations", "sagemaker_compatibility", cloud.invocations, summary, bodies, answer=answers, event=events),
        inference(
            "/vertex", "vertex_compatibility", cloud.vertex, "Several prompts or chats (Vertex AI)", VertexRequest, answer=VertexResponse
        ),
    ]


def _questions(health: Health, pages: Pages, live: LiveRoute) -> list[Operation]:
    def probe(path: str, name: str, handler: Handler, summary: str) -> Operation:
        return Operation("GET", path, name, handler, summary, errors={503: "No"}, error=schema.HealthError)

    loading = {503: "The model is loading"}
    return [
        Operation("GET", "/info", "get_model_info", pages.info, "Model and limits", answer=schema.Info, errors=loading),
        Operation("GET", "/metrics", "metrics", pages.metrics, "Prometheus metrics", text="text/plain"),
        Operation("GET", "/debug/live", "live_page", live.live, "What /dashboard shows", answer=Live, errors={400: "`since` is no number"}),
        Operation("GET", "/debug/speculation", "speculation", pages.speculation, "What the controller thinks", answer=list[View]),
        probe("/", "root_health", health.health, "Can requests be sent?"),
        probe("/health", "health", health.health, "Can requests be sent?"),
        probe("/ping", "ping", health.health, "Can requests be sent? (SageMaker)"),
        probe("/health/live", "live", health.live, "Is the process worth keeping?"),
        probe("/health/ready", "ready", health.health, "Should new requests be routed here?"),
        probe("/health/generate", "generates", health.generate, "Does a token come out?"),
    ]
