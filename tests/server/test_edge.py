"""What every request passes: key, CORS, names, and errors as JSON whatever went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib.util
import json
import socket

import pytest

from forerun.router.service import Phase
from forerun.server import edge
from tests.server.front import LIMITS, serve, stuck, until

INFERENCE = ["/", "/generate", "/generate_stream", "/invocations", "/tokenize", "/v1/chat/completions", "/v1/completions", "/vertex"]
OPEN = ["/", "/health", "/ping", "/info", "/metrics", "/docs", "/api-doc/openapi.json", "/health/live", "/health/ready"]


@pytest.mark.parametrize("path", [*INFERENCE, "/chat_tokenize"])
async def test_the_key_guards_whatever_generates(path: str) -> None:
    async with serve("--api-key", "Secret") as front:
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "Secret"}, {"Authorization": "Bearer Secret "[:-2]}):
            async with front.session.post(front.url + path, json={"inputs": "x"}, headers=headers) as response:
                assert response.status == 401
                assert response.headers["www-authenticate"] == "Bearer"
                told = await response.json()
                assert set(told) == {"error", "error_type"} and told["error_type"] == "unauthorized"
                assert not path.startswith("/v1/") or told["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer", "BEARER"):  # which has no case, as TGI's clients know; the key has
            response, _ = await front.raw(path, {"inputs": "x"}, headers={"Authorization": f"{scheme} Secret"})
            assert response.status in (200, 422)


@pytest.mark.parametrize("path", OPEN)
async def test_probes_and_pages_need_no_key(path: str) -> None:
    """A40: a key must not lock out who asks whether the server is well."""
    async with serve("--api-key", "Secret") as front:
        response, _ = await front.get(path)
        assert response.status == 200


async def test_without_a_key_authorization_is_ignored() -> None:
    async with serve() as front:
        status, _ = await front.post("/generate", {"inputs": "x"}, headers={"Authorization": "Bearer anything"})
        assert status == 200


async def test_a_browser_may_send_the_key_and_read_the_headers() -> None:
    async with serve() as front:
        asked = {"Origin": "https://a", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-own"}
        async with front.session.options(front.url + "/generate", headers=asked) as response:
            assert response.status == 200 and await response.read() == b""
            assert response.headers["access-control-allow-origin"] == "*"
            assert response.headers["access-control-allow-methods"] == "GET,POST"
            assert response.headers["access-control-allow-headers"] == "authorization,x-own"
        response, _ = await front.raw("/generate_stream", {"inputs": "x"})
        assert response.headers["access-control-allow-origin"] == "*"
        assert response.headers["access-control-expose-headers"] == "*"
        assert "origin" in response.headers["vary"]


async def test_listed_origins_only() -> None:
    async with serve("--cors-allow-origin", "https://a", "--cors-allow-origin", "https://b") as front:
        for origin, allowed in (("https://a", "https://a"), ("https://b", "https://b"), ("https://c", None)):
            response, _ = await front.get("/health", headers={"Origin": origin})
            assert response.headers.get("access-control-allow-origin") == allowed


async def test_request_ids_are_kept_or_made() -> None:
    async with serve() as front:
        response, _ = await front.raw("/generate", {"inputs": "x"}, headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert front.router.submitted[0].request.id == "mine-1"
        for bad in ("", "with space", "x" * 129):
            response, _ = await front.get("/health", headers={"x-request-id": bad})
            assert response.headers["x-request-id"] not in ("", bad)
        response, _ = await front.get("/nowhere")
        assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/nowhere", 404), ("GET", "/generate", 405), ("PUT", "/", 405), ("DELETE", "/health", 405)],
)
async def test_unknown_routes_and_methods(method: str, path: str, status: int) -> None:
    async with serve() as front, front.session.request(method, front.url + path) as response:
        assert response.status == status
        assert set(await response.json()) == {"error", "error_type"}
        assert ("allow" in response.headers) == (status == 405)


async def test_bodies_that_cannot_be_read() -> None:
    async with serve("--payload-limit", "1000") as front:
        for data, headers, status in [
            (b'{"inputs":"x"}', {"Content-Type": "text/plain"}, 415),
            (b'{"inputs":"x"}', {"Content-Type": "application/jsonp"}, 415),
            (b"{", {"Content-Type": "application/json"}, 400),
            (b'{"inputs":"' + b"x" * 1000 + b'"}', {"Content-Type": "application/json"}, 413),
            (b"{}", {"Content-Type": "application/json"}, 422),
        ]:
            for path in ("/", "/generate", "/generate_stream", "/invocations", "/tokenize"):
                async with front.session.post(front.url + path, data=data, headers=headers) as response:
                    assert response.status == status
                    error = await response.json()
                    assert error["error_type"] == "validation"
        for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
            async with front.session.post(front.url + "/tokenize", data=b'{"inputs":"x"}', headers={"Content-Type": kind}) as response:
                assert response.status == 200


async def test_a_body_of_exactly_the_limit_is_taken() -> None:
    body = json.dumps({"inputs": "x"}).encode()
    body += b" " * (1000 - len(body))
    async with serve("--payload-limit", "1000") as front:
        for extra, status in ((b"", 200), (b" ", 413)):
            sent = front.session.post(front.url + "/tokenize", data=body + extra, headers={"Content-Type": "application/json"})
            async with sent as response:
                assert response.status == status


HEAD = "POST /generate HTTP/1.1\r\nHost: x\r\n"
WAITS = "Expect: 100-continue\r\nConnection: close\r\n"
JSON = "Content-Type: application/json\r\n"
KEY = "Authorization: Bearer Secret\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + WAITS + KEY + JSON, 200),
        (HEAD + WAITS.replace("100-continue", "100-Continue") + KEY + JSON, 200),
        (HEAD + WAITS + JSON, 401),
        (HEAD + WAITS + KEY, 415),
        (HEAD + WAITS + KEY + JSON + "Content-Length: 1001\r\n", 413),
    ],
)
async def test_a_body_is_asked_for_by_whoever_will_read_it(head: str, status: int) -> None:
    """`Expect: 100-continue`: a client is told what is wrong before it sends megabytes."""
    body = b'{"inputs":"x"}'
    head += "" if "Content-Length" in head else f"Content-Length: {len(body)}\r\n"
    async with serve("--payload-limit", "1000", "--api-key", "Secret") as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(head.encode() + b"\r\n")
        if status == 200:
            assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n" and await reader.readline() == b"\r\n"
            writer.write(body)
        assert (await reader.readline()).split()[1] == str(status).encode()
        writer.close()


async def test_a_body_that_nobody_asked_for_ends_the_connection() -> None:
    """A client that was refused keeps its body to itself, so that its next request would be taken for it."""
    async with serve("--api-key", "Secret") as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(f"{HEAD}Expect: 100-continue\r\n{JSON}Content-Length: 14\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        writer.close()
    assert head.split()[1] == b"401" and b"connection: close" in head.lower()


@pytest.mark.parametrize("head", [HEAD.replace("1.1", "1.0") + WAITS, HEAD + "Expect: wonders\r\nConnection: close\r\n"])
async def test_other_expectations_are_ignored(head: str) -> None:
    body = b'{"inputs":"x"}'
    async with serve() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(f"{head}{JSON}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\nInjected: yes\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 10_000,
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope",
    ],
)
async def test_broken_http_is_refused_and_leaves_no_trace_in_the_log(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        head, _, said = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.") and head.split()[1] == b"400"
        assert b"aiohttp" not in head and b"\nInjected" not in head and b"content-type: application/json" in head.lower()
        error = json.loads(said)
        assert error.keys() == {"error", "error_type"} and error["error_type"] == "validation"
        assert len(error["error"]) < 300 and "\n" not in error["error"]
        assert (await front.get("/health"))[0].status == 200
    assert caplog.records == []


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"x" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_heads_that_are_too_long_are_not_repeated(raw: bytes) -> None:
    async with serve("--payload-limit", "1000") as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        head, _, said = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == b"431" and b"\r\nx-request-id: " in head.lower() and len(said) < 300
        assert json.loads(said)["error_type"] == "validation"


@pytest.mark.parametrize(("encoding", "packages"), [("br", ("brotli", "brotlicffi")), ("zstd", ("backports.zstd", "compression"))])
async def test_an_encoding_that_cannot_be_read(encoding: str, packages: tuple[str, ...]) -> None:
    """The client is told what it may send, and not what to install here."""
    if any(importlib.util.find_spec(name.partition(".")[0]) for name in packages):
        pytest.skip("the library reads it")
    raw = f"{HEAD}{JSON}Content-Encoding: {encoding}\r\nContent-Length: 4\r\n\r\nnope"
    async with serve() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(raw.encode())
        head, _, said = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
        writer.close()
    assert head.split()[1] == b"415" and b"accept-encoding: gzip, deflate" in head.lower()
    assert "gzip" in json.loads(said)["error"] and "install" not in json.loads(said)["error"]


async def test_bodies_may_be_compressed_but_not_too_large() -> None:
    async with serve("--payload-limit", "1000") as front:
        for text, status in (("x", 200), ("x" * 999, 413), ("x" * 9_999_999, 413)):
            data = gzip.compress(json.dumps({"inputs": text}).encode())
            headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            async with front.session.post(front.url + "/tokenize", data=data, headers=headers) as response:
                assert response.status == status


async def test_a_bug_outside_of_every_handler_is_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(http: object) -> None:
        raise ValueError("private")

    monkeypatch.setattr(edge.identity, "name", broken)
    async with serve() as front:
        response, body = await front.get("/health")
        assert response.status == 500 and response.content_type == "application/json"
        assert json.loads(body)["error_type"] == "internal" and b"private" not in body


async def test_a_request_behind_a_broken_one_is_not_served() -> None:
    """Who sends half of nonsense must not have the rest of it taken for a request of its own."""
    async with serve() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"GET / HTTP/9.9\r\n\r\nGET /info HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert answer.count(b"HTTP/1.") == 1 and b"model_id" not in answer


async def test_a_header_that_proxies_made_long() -> None:
    async with serve() as front:
        response, _ = await front.get("/health", headers={"Authorization": "Bearer " + "x" * 30_000})
        assert response.status == 200


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "UNREAD_SECONDS", 0.5)
    body = json.dumps({"inputs": "hello " * 40_000}).encode()
    async with serve() as front:
        whole = len((await front.raw("/tokenize", json.loads(body)))[1])
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, ("127.0.0.1", front.port))
            head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            await asyncio.get_running_loop().sock_sendall(deaf, head + body)
            await asyncio.sleep(3)
            got = 0
            with contextlib.suppress(ConnectionResetError):
                while part := await asyncio.get_running_loop().sock_recv(deaf, 1 << 16):
                    got += len(part)
            assert got < whole


async def test_our_own_bugs_are_json_too() -> None:
    async with serve() as front:
        front.services.tokenizer.encode = None
        assert (await front.post("/generate", {"inputs": "x"}))[1]["error_type"] == "internal"
        await front.settled()


async def test_overload_answers_at_once_and_passes() -> None:
    async with serve(script=stuck, step_seconds=0.01) as front:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 1}}
        waiting = [asyncio.create_task(front.post("/generate", body)) for _ in range(LIMITS.max_concurrent_requests)]
        await until(lambda: front.router.inside == LIMITS.max_concurrent_requests)
        async with asyncio.timeout(2):
            refused = await asyncio.gather(*(front.post("/generate", body) for _ in range(42)))
        assert refused == [(429, {"error": "Model is overloaded", "error_type": "overloaded"})] * 42
        # The permit comes before the parameters are looked at.
        assert (await front.post("/generate", {"inputs": "", "parameters": {"max_new_tokens": 0}}))[0] == 429
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await front.settled()
        assert f'tgi_request_failure{{err="overloaded"}} {43}' in front.services.metrics.text()


async def test_best_of_takes_as_many_permits() -> None:
    async with serve(script=stuck, step_seconds=0.01) as front:
        front.router.inside = LIMITS.max_concurrent_requests - 1
        status, _ = await front.post("/generate", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}})
        assert status == 429
        front.router.inside = 0


async def test_while_loading_inference_is_told_to_come_back() -> None:
    async with serve() as front:
        front.router.phase = Phase.LOADING
        for path in ("/", "/generate", "/generate_stream", "/invocations"):
            async with front.session.post(front.url + path, json={"inputs": "x"}) as response:
                assert response.status == 429
                assert response.headers["retry-after"] == "3"
        front.services.tokenizer, kept = None, front.services.tokenizer
        assert (await front.post("/tokenize", {"inputs": "x"}))[0] == 429
        front.services.tokenizer = kept
