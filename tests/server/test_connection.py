"""The seam to aiohttp: every connection is ours, and the library still keeps account of it. What broken HTTP is told: test_edge.py."""

from __future__ import annotations

import ast
import asyncio
import inspect

from aiohttp import web

from forerun.config import Config
from forerun.server import connection
from forerun.server.app import Services, build_app, make_runner
from forerun.server.connection import Connection
from tests.server.front import FakeRouter, byte_level, serve, until


def test_nothing_private_of_the_library_is_named() -> None:
    """What begins with `_` may change in any release; on `self` it is what our own classes set."""
    tree = ast.parse(inspect.getsource(connection))
    ours = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in ours, node.attr
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("_"):
            assert node.name.startswith("__") or node in tree.body, node.name


async def test_our_names_are_not_the_librarys() -> None:
    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError

    assert "_made" not in dir(web.Server(handler)) and "_options" not in dir(web.Server(handler))
    assert "_connection" not in dir(web.AppRunner(web.Application()))


async def test_what_a_site_makes_is_ours() -> None:
    tokenizer = byte_level()
    runner = make_runner(build_app(Config.parse(["--model-id", "tiny"], {}), FakeRouter(tokenizer), Services(tokenizer=tokenizer)))
    assert runner.server is None
    await runner.setup()
    assert runner.server is not None and type(runner.server()) is Connection
    await runner.cleanup()
    assert runner.server is None
    tokenizer.close()


async def test_the_library_knows_our_connections_and_closes_idle_ones() -> None:
    async with serve() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(10):
        while await reader.read(4096):  # to the end: the server has closed it, and did not wait for its patience
            pass
    writer.close()


async def test_a_client_that_leaves_cancels_its_handler() -> None:
    async with serve(step_seconds=0.01) as front:
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        body = b'{"inputs":"x","parameters":{"max_new_tokens":200}}'
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await until(lambda: front.router.running > 0)
        writer.close()
        await until(lambda: bool(front.router.cancelled) and not front.router.running)
        await front.settled()
