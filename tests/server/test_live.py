"""What the live page is told (`/debug/live`), and the files it is made of."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from forerun.messages import Progress
from forerun.router.observer import Load, StepReport
from forerun.router.request import Failure
from forerun.router.service import Phase
from forerun.server import static
from tests.server.front import Front, runs, serve
from tests.server.test_speculation import joined


async def live(front: Front, query: str = "") -> Any:
    response, body = await front.get("/debug/live" + query)
    assert response.status == 200 and response.headers["cache-control"] == "no-store"
    return json.loads(body)


async def test_a_server_that_did_nothing_yet() -> None:
    async with serve() as front:
        told = await live(front)
        assert told["phase"] == "ready" and told["problem"] == "" and told["secured"] is False
        assert told["history"] == [] and told["first_token"] is None and told["between_tokens"] is None
        assert told["requests"] == {"received": 0, "answered": 0, "failed": 0, "overloaded": 0}
        assert told["model"]["pages"] == 64 and told["model"]["max_concurrent_requests"] == 8


async def test_requests_show_in_counts_and_times() -> None:
    async with serve(script=runs([1], [2, 3], [4])) as front:
        await front.events("/generate_stream", {"inputs": "hello", "parameters": {"max_new_tokens": 4}})
        await front.post("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 0}})
        told = await live(front)
        assert told["requests"] == {"received": 2, "answered": 1, "failed": 1, "overloaded": 0}
        assert told["first_token"]["tokens"] == 1 and told["between_tokens"]["tokens"] == 3
        assert 0 < told["between_tokens"]["p50"] <= told["between_tokens"]["p99"]


async def test_samples_since_the_last_one_seen() -> None:
    async with serve() as front:
        history = front.services.metrics.batch.history
        for second in range(5):
            history.stepped(StepReport(0.01, 0, 1, 1, 0, 1, 0, 0, 0, 9000))
            history.load(Load(1, 2, 3, 4, 64, 16), 100.0 + second)
        assert [sample[0] for sample in (await live(front))["history"]] == [100.0, 101.0, 102.0, 103.0, 104.0]
        assert (await live(front, "?since=103"))["history"] == [[104.0, 2, 1, 3, 4, 5, 0, 5, 0, 0]]


@pytest.mark.parametrize("asked", ["", "x", "1,0", "%00"])
async def test_since_must_be_a_number(asked: str) -> None:
    async with serve() as front:
        response, body = await front.get("/debug/live?since=" + asked)
        assert response.status == 400 and json.loads(body)["error_type"] == "validation"


@pytest.mark.parametrize(("asked", "shown"), [("nan", 1), ("inf", 0), ("-inf", 1), ("1e999", 0), ("-1", 1)])
async def test_numbers_that_are_none_do_no_harm(asked: str, shown: int) -> None:
    async with serve() as front:
        front.services.metrics.batch.history.load(Load(1, 2, 3, 4, 64, 16), 100.0)
        assert len((await live(front, "?since=" + asked))["history"]) == shown


async def test_phases_and_what_is_known_in_them() -> None:
    async with serve() as front:
        front.router.phase, front.router.progress = Phase.LOADING, Progress("loading", 1, 4)
        front.router.limits, front.router.beat = None, float("inf")
        told = await live(front)
        assert told["model"] is None and told["silence"] is None
        assert told["phase"] == "loading" and told["progress"] == {"stage": "loading", "done": 1, "total": 4}
        front.router.phase, front.router.failure = Phase.FAILED, Failure("three workers died", "generation", 503)
        told = await live(front)
        assert (told["phase"], told["problem"]) == ("failed", "three workers died")


async def test_guesses_are_there_as_on_the_debug_route() -> None:
    async with serve() as front:
        await joined(front)
        told = (await live(front))["speculation"]
        (full,) = json.loads((await front.get("/debug/speculation"))[1])
        assert told == [{"controller": full["controller"], "survival": full["survival"]}]


async def test_under_an_api_key_it_is_as_open_as_the_metrics_and_says_nothing_of_requests() -> None:
    async with serve("--api-key", "Secret") as front:
        sent = {"inputs": "confidential", "parameters": {"max_new_tokens": 3}}
        await front.post("/generate", sent, headers={"Authorization": "Bearer Secret", "x-request-id": "client-7"})
        for path in ("/debug/live", "/dashboard", "/dashboard/app.js"):
            response, body = await front.get(path)
            assert response.status == 200
            assert not re.search(b"Secret|confidential|client-7", body)
        assert (await live(front))["secured"] is True


async def test_the_page_may_talk_to_this_server_only() -> None:
    async with serve() as front:
        response, body = await front.get("/dashboard")
        assert response.content_type == "text/html"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        for name in static._FILES:
            response, body = await front.get("/dashboard/" + name)
            assert response.status == 200
            without_names = body.replace(b"http://www.w3.org/", b"")
            assert b"//" not in re.sub(rb"(?m)(^|\s)//.*$", b"", without_names), f"{name} names another host"
            assert not re.search(rb"innerHTML|insertAdjacentHTML|document\.write|eval\(", body), f"{name} may make markup of text"


async def test_files_are_asked_for_again_and_answered_shortly() -> None:
    async with serve() as front:
        response, _ = await front.get("/dashboard/style.css")
        assert response.headers["cache-control"] == "no-cache"
        again, body = await front.get("/dashboard/style.css", headers={"if-none-match": response.headers["etag"]})
        assert (again.status, body) == (304, b"")


async def test_addresses_that_are_nearly_right() -> None:
    async with serve() as front:
        response, _ = await front.get("/dashboard/", allow_redirects=False)
        assert (response.status, response.headers["location"]) == (308, "../dashboard")
        assert (await front.get("/dashboard/"))[0].status == 200
        for path in ("/dashboard/none.js", "/dashboard/..%2fapp.py", "/dashboard/app.py"):
            response, body = await front.get(path)
            assert response.status == 404 and json.loads(body)["error_type"] == "not_found"
