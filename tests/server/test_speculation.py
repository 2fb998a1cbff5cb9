"""What a scraper and a curious operator see of speculation: counters by source and position, gauges, guards, and the debug route."""

from __future__ import annotations

import dataclasses
import json

import msgspec

from forerun.router.controller.journal import Journal, View
from forerun.router.guesses import Guard, Round, Snapshot
from forerun.router.observer import StepReport
from tests.server.front import Front, serve
from tests.server.test_metrics import families, scrape

REPORT = StepReport(0.01, 0, 2, 7, 5, 5, 5, 3, 100, 9000, 2, 2, [2, 1], [([2, 1], [1, 1]), ([2], [1])])


def view() -> View:
    journal = Journal(["suffix", "model=small"])
    journal.heard(Round(2, 7, 5, 2, 100, 5, 0.01, 1e-4, drafts=2), REPORT.sources)
    guards = {1: Guard("closed", 0, 0, 0.0), 3: Guard("open", 2, 128, 2.5)}
    snapshot = Snapshot("price", True, 8, 2, 0.25, 1.5, 0.0098, 0.01, 1.02, 1.1, guards, [(1, 0.006, 0.0066)], [0.0, 3e-5], 0.9, 1.2)
    return View(snapshot, journal.curves(), list(journal.rounds))


async def joined(front: Front) -> None:
    assert front.router.ready is not None
    front.router.ready = msgspec.structs.replace(front.router.ready, drafter="suffix+model=/models/small")
    front.router.views = [view()]
    front.services.metrics.batch.stepped(REPORT)


async def test_guesses_are_counted_by_source_and_position() -> None:
    async with serve() as front:
        await joined(front)
        page = await scrape(front)
        drafted, accepted = "forerun_speculation_drafted_tokens_total", "forerun_speculation_accepted_tokens_total"
        assert page[drafted + '{source="suffix",position="0"}'] == 2
        assert page[drafted + '{source="suffix",position="1"}'] == 1
        assert page[drafted + '{source="model=small",position="0"}'] == 2
        assert page[accepted + '{source="model=small",position="0"}'] == 1
        assert page["forerun_speculation_drafts_total"] == 2
        assert page["forerun_speculation_draft_seconds_total"] == 1e-4 and page["forerun_speculation_verify_seconds_total"] == 9e-3


async def test_what_drafters_had_to_do_without_is_counted() -> None:
    async with serve() as front:
        await joined(front)
        front.services.metrics.batch.stepped(dataclasses.replace(REPORT, late_positions=48, late_answers=2, unserved=3))
        page = await scrape(front)
        assert page["forerun_speculation_late_positions_total"] == 48 and page["forerun_speculation_late_answers_total"] == 2
        assert page["forerun_speculation_unserved_total"] == 3


async def test_vllm_s_names_as_its_exporter_writes_them() -> None:
    async with serve() as front:
        await joined(front)
        page = await scrape(front)
        (labels,) = [key.partition("{")[2][:-1] for key in page if key.startswith("vllm:spec_decode_num_drafts_total")]
        assert labels.startswith('engine="0",model_name="')
        assert page[f"vllm:spec_decode_num_drafts_total{{{labels}}}"] == 2
        assert page[f"vllm:spec_decode_num_draft_tokens_total{{{labels}}}"] == 5
        assert page[f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}"] == 3
        assert page[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}}'] == 1
        found = families((await front.get("/metrics"))[1].decode())
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"):
            assert found[f"vllm:spec_decode_{name}"].type == "counter"


async def test_what_the_controller_thinks_is_on_the_page() -> None:
    async with serve() as front:
        await joined(front)
        page = await scrape(front)
        assert (page["forerun_speculation_budget"], page["forerun_speculation_price"], page["forerun_speculation_gain"]) == (8, 0.25, 1.5)
        assert page["forerun_speculation_predicted_step_seconds"] == 0.0098 and page["forerun_speculation_measured_step_seconds"] == 0.01
        assert page["forerun_speculation_floor_step_seconds"] == 0.0066
        guard = "forerun_speculation_guard_state"
        assert page[guard + '{replica="0",sequences="1"}'] == 0 and page[guard + '{replica="0",sequences="3"}'] == 2
        assert page['forerun_speculation_guard_openings_total{replica="0",sequences="3"}'] == 2


async def test_without_a_drafter_only_the_sums_are_there() -> None:
    async with serve() as front:
        text = (await front.get("/metrics"))[1].decode()
        assert "forerun_speculation_drafts_total 0" in text and "forerun_speculation_drafted_tokens_total{" not in text
        families(text)


async def test_the_debug_route_shows_curves_costs_guards_and_rounds() -> None:
    async with serve() as front:
        await joined(front)
        response, body = await front.get("/debug/speculation")
        assert response.status == 200 and response.content_type == "application/json"
        (shown,) = json.loads(body)
        controller = shown["controller"]
        assert controller["guards"]["3"] == {"state": "open", "openings": 2, "wait": 128, "short": 2.5}
        assert controller["costs"] == [[1, 0.006, 0.0066]] and controller["price"] == 0.25
        assert shown["survival"]["suffix"]["survival"] == [0.5, 0.5]
        assert shown["rounds"][0]["tokens"] == 5
