"""The live page in a real browser: what it shows, in every state of a server, with nothing but this server to talk to."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from forerun.messages import Progress
from forerun.router.observer import Load
from forerun.router.request import Failure
from forerun.router.service import Phase
from tests.browser import needs_browser, tool
from tests.server.front import Front, runs, serve, stuck
from tests.server.test_native import ids
from tests.server.test_speculation import REPORT, joined

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with tool.started(tmp_path_factory.mktemp("browser")) as port:
        yield port


@pytest.fixture
async def page(browser: int) -> AsyncIterator[Any]:
    async with tool.tab(browser) as opened:
        yield opened


async def text(page: Any, selector: str) -> str:
    """With plain spaces where the page has some that do not break."""
    return str(await page.run(f"document.querySelector('{selector}').textContent")).replace("\xa0", " ")


async def shows(page: Any, selector: str, wanted: str) -> None:
    await page.until(f"document.querySelector('{selector}').textContent.includes({wanted!r})")


async def opened(page: Any, front: Front, width: int = 1440) -> None:
    await page.view(width, 900)
    await page.open(front.url + "/dashboard")


async def filled(page: Any, most: int) -> None:
    """The playground, ready to go on with "x" by so many tokens."""
    for name, value in (("mode", "text"), ("prompt", "x"), ("most", most)):
        await page.run(f"document.getElementById('{name}').value = '{value}'")


def at_work(front: Front, seconds: int = 20) -> None:
    """History of a server that guesses, ending now: 5 tokens a second, 3 of them guessed."""
    history = front.services.metrics.batch.history
    began = time.monotonic() - seconds
    for second in range(seconds):
        history.load(Load(1, 2, 16, 8, 64, 16), began + second)
        history.stepped(REPORT)


async def test_numbers_charts_and_tables(page: Any) -> None:
    async with serve() as front:
        await joined(front)
        at_work(front)
        await opened(page, front)
        await shows(page, "#status", "Live")
        await shows(page, "#rate", "5")
        assert (await text(page, "#running"), await text(page, "#running-sub")) == ("2", "1 waiting · room for 8")
        assert (await text(page, "#kv"), await text(page, "#kv-sub")) == ("25 %", "13 % cached · 640 tokens free")
        assert await text(page, "#yield") == "2.50" and await text(page, "#yield-sub") == "60 % of guesses held"
        assert await text(page, "#facts") == "echo · none · suffix+model=/models/small"
        assert await page.run("[...document.querySelectorAll('#acceptance tbody th')].map(e => e.textContent)") == ["suffix", "model=small"]
        assert await page.run("[...document.querySelectorAll('#acceptance tbody td')].map(e => e.textContent)") == [
            "50 %2",
            "100 %1",
            "50 %2",
            "–\xa0",
        ]
        assert await page.run("[...document.querySelectorAll('#guards li')].map(e => e.textContent)") == [
            "1 sequenceguesses pay",
            "3 sequences and moreswitched offwas switched off 2 times, last for 128 steps",
        ]
        assert "25 %" in await text(page, "#controller")
        assert await text(page, "#costs tbody tr") == "16 ms6.6 ms6.6 ms"
        assert (await page.run("document.querySelector('#chart-rate path.area').getAttribute('d')")).startswith("M")
        # A chart is read with the keyboard too.
        await page.run("document.querySelector('#chart-load .plot').focus()")
        await page.key("Home", code=36)
        assert (await text(page, "#chart-load .when")).endswith(" s ago")
        assert "running 2, waiting 1" in await page.run("document.querySelector('#chart-load .plot').getAttribute('aria-label')")
        assert page.errors == []
        assert {address.split("/")[2] for address in page.asked} == {front.url.split("/")[2]}


async def test_of_several_replicas_one_is_chosen(page: Any) -> None:
    async with serve() as front:
        await joined(front)
        await opened(page, front)
        await shows(page, "#status", "Live")
        assert await page.run("document.getElementById('replica-field').hidden"), "there is nothing to choose"
        first = front.router.views[0]
        front.router.views = [first, msgspec.structs.replace(first, controller=dataclasses.replace(first.controller, price=0.77))]
        await page.until("document.querySelectorAll('#replica option').length === 2")
        assert await page.run("[...document.getElementById('replica').options].map(e => e.text)") == ["1 of 2", "2 of 2"]
        assert "25 %" in await text(page, "#controller")
        await page.run("document.getElementById('replica').selectedIndex = 1")
        await shows(page, "#controller", "77 %")
        assert page.errors == []


async def test_the_playground_colours_tokens_and_cannot_be_made_to_run_them(page: Any) -> None:
    bait = "<img src=x onerror=document.title='run'>"
    async with serve(script=runs(ids("a"), ids(bait))) as front:
        await opened(page, front)
        await shows(page, "#status", "Live")
        await filled(page, 1 + len(ids(bait)))
        await page.run("document.getElementById('prompt').focus()")
        await page.key("Enter", code=13, modifiers=2)
        await shows(page, "#told", "in 2 steps")
        assert await page.run("document.getElementById('answer').children.length === document.getElementById('answer').childNodes.length")
        assert await text(page, "#answer") == "a" + bait
        classes = await page.run("[...document.getElementById('answer').children].map(e => e.className)")
        assert classes == ["computed", *["guessed"] * (len(ids(bait)) - 1), "computed"]
        assert await page.run("document.querySelector('#answer img')") is None and await page.run("document.title") == "Forerun"
        submitted = front.router.submitted[0].request
        assert submitted.tokens == ids("x") and submitted.speculate is None
        assert page.errors == []


async def test_stop_leaves_the_server_free(page: Any) -> None:
    async with serve(script=stuck, step_seconds=0.01) as front:
        await opened(page, front)
        await shows(page, "#status", "Live")
        await filled(page, 5)
        await page.run("document.getElementById('go').click()")
        await page.until("!document.getElementById('stop').disabled")
        await shows(page, "#told", "Waiting")
        await page.run("document.getElementById('stop').click()")
        await shows(page, "#told", "Stopped")
        assert await page.run("document.getElementById('stop').disabled && !document.getElementById('go').disabled")
        await front.settled()


async def test_errors_are_told_in_words(page: Any) -> None:
    async with serve("--api-key", "Secret", script=runs(ids("ab"), failure=Failure("worker lost", "generation", 424))) as front:
        await opened(page, front)
        await page.until("!document.getElementById('key-field').hidden")
        await filled(page, 5)
        await page.run("document.getElementById('go').click()")
        await shows(page, "#told", "API key")
        await page.run("document.getElementById('key').value = 'Secret'; document.getElementById('go').click()")
        await shows(page, "#told", "worker lost")
        assert await text(page, "#answer") == "ab", "what had come stays"
        await page.run("document.getElementById('most').value = 0; document.getElementById('ask').noValidate = true")
        await page.run("document.getElementById('go').click()")
        await shows(page, "#told", "422: Input validation error: `max_new_tokens` must be strictly positive")


async def test_a_server_that_loads_goes_and_comes_back(page: Any) -> None:
    async with serve() as front:
        kept, front.router.limits = front.router.limits, None
        front.router.phase, front.router.progress = Phase.LOADING, Progress("loading", 1, 4)
        await opened(page, front)
        await shows(page, "#status", "Loading: loading, 1 of 4")
        front.router.phase, front.router.progress, front.router.limits = Phase.READY, None, kept
        await shows(page, "#status", "Live")
        await shows(page, "#chart-rate", "Nothing was generated")
        await shows(page, "#speculation-says", "Guessing is off")
        front.router.beat = 7.0
        await shows(page, "#status", "The worker has been silent for 7 s")
        front.router.beat = 0.0
        await page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
        await shows(page, "#status", "The server is gone, trying again")
        assert await page.run("document.getElementById('page').dataset.stale") == "true"
        await page.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)
        await shows(page, "#status", "Live")
        assert await page.run("document.getElementById('page').dataset.stale") == "false"


@pytest.mark.parametrize("width", [390, 768, 1440])
async def test_it_fits_and_does_not_move(page: Any, width: int) -> None:
    async with serve() as front:
        await joined(front)
        at_work(front)
        await opened(page, front, width)
        await shows(page, "#status", "Live")
        assert await page.run("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        tops = "[...document.querySelectorAll('.tile, figure, .playground')].map(e => e.getBoundingClientRect().top + scrollY)"
        before = await page.run(tops)
        front.services.metrics.batch.history.load(Load(10_000, 12_345, 64, 0, 64, 16), time.monotonic())
        front.services.metrics.requests.gaps.observe(time.monotonic(), 123.456)
        await shows(page, "#running", "12,345")
        assert await page.run(tops) == before
