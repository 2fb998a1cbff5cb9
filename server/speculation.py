"""Speculation on the metrics page and on `/debug/speculation`: what was guessed and held, and what the controller thinks.

Counters grow with each step; gauges are read when somebody looks. Series are labelled by source and position, which are known once a
worker is ready, so they appear then. The names that begin with `vllm:` are those of vLLM's exporter, for dashboards that have them.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.messages import Ready
from forerun.router.controller.journal import View, sources_of
from forerun.router.observer import StepReport
from forerun.server.exposition import Exposition

STATES = {"closed": 0, "half-open": 1, "open": 2}


class SpeculationMetrics:
    def __init__(self, page: Exposition) -> None:
        self._drafts = 0
        self._counts: list[tuple[list[int], list[int]]] = []
        """for each source: drafted and accepted, by position"""
        counter, gauge = "counter", "gauge"
        drafted, accepted = "Guesses verified, by who made them and how far ahead", "Guesses that held, likewise"
        self._drafted = page.family("forerun_speculation_drafted_tokens_total", drafted, counter)
        self._accepted = page.family("forerun_speculation_accepted_tokens_total", accepted, counter)
        self._drafts_total = page.counter("forerun_speculation_drafts_total", "Drafts verified: one for each row and step with guesses")
        self._failures = page.counter("forerun_speculation_failures_total", "Times that the drafter raised; no answer was touched")
        lacking = "Tokens that drafters reading the target's features know nothing of: found computed, or too much waited"
        self._late_positions = page.counter("forerun_speculation_late_positions_total", lacking)
        self._late_answers = page.counter(
            "forerun_speculation_late_answers_total", "Times that the guesses of a draft service were not there, or built on an older text"
        )
        self._unserved = page.counter(
            "forerun_speculation_unserved_total", "Times that a draft service had no room for a sequence that guesses were wanted for"
        )
        self._drafting = page.counter("forerun_speculation_draft_seconds_total", "Seconds that drafting took")
        self._verifying = page.counter("forerun_speculation_verify_seconds_total", "Seconds of the forwards with guesses, roots included")
        self._budget = page.gauge("forerun_speculation_budget", "Guesses that the last step with guesses might have")
        self._asked = page.gauge("forerun_speculation_asked_sequences", "Sequences that it asked the drafter about")
        self._price = page.gauge("forerun_speculation_price", "Survival below which a guess is not worth its time")
        self._gain = page.gauge("forerun_speculation_gain", "Tokens a second that are expected over those of plain decoding")
        self._expected = page.gauge("forerun_speculation_predicted_step_seconds", "What the last step without prompts was expected to take")
        self._measured = page.gauge("forerun_speculation_measured_step_seconds", "What it took")
        self._floor = page.gauge("forerun_speculation_floor_step_seconds", "What a step of one row without guesses takes now")
        self._drift = page.gauge("forerun_speculation_machine_drift", "How much slower than when it was profiled the machine is")
        self._guards = page.family(
            "forerun_speculation_guard_state", "0 = guesses pay, 1 = on trial, 2 = switched off; by least number of sequences", gauge
        )
        self._openings = page.family("forerun_speculation_guard_openings_total", "Times that guessing was switched off", counter)
        self._vllm = [
            page.family("vllm:spec_decode_num_drafts_total", "Number of spec decoding drafts.", counter),
            page.family("vllm:spec_decode_num_draft_tokens_total", "Number of draft tokens.", counter),
            page.family("vllm:spec_decode_num_accepted_tokens_total", "Number of accepted tokens.", counter),
        ]
        self._vllm_by_position = page.family(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total", "Accepted tokens per draft position.", counter
        )
        self._drafted_tokens = self._accepted_tokens = 0
        self._positions: list[int] = []

    def stepped(self, report: StepReport) -> None:
        self._failures.add(report.draft_failures)
        self._late_positions.add(report.late_positions)
        self._late_answers.add(report.late_answers)
        self._unserved.add(report.unserved)
        if report.asked:
            self._drafting.add(report.draft_us / 1e6)
        if not report.nodes:
            return
        self._verifying.add(report.verify_us / 1e6)
        self._drafts += report.drafts
        self._drafted_tokens += report.drafted
        self._accepted_tokens += report.accepted
        _add(self._positions, report.accepted_at)
        for place, new in enumerate(report.sources):
            if place == len(self._counts):
                self._counts.append(([], []))
            for known, more in zip(self._counts[place], new):
                _add(known, more)

    def look(self, ready: Ready | None, views: Sequence[View], model: str) -> None:
        """Bring the page up to date: before it is read."""
        if ready is None:
            return
        self._drafts_total.value = self._drafts
        for place, name in enumerate(sources_of(ready.drafter)):
            counts = self._counts[place] if place < len(self._counts) else ([], [])
            for family, of_source in zip((self._drafted, self._accepted), counts):
                for position, count in enumerate(of_source or [0]):
                    family.series(source=name, position=str(position)).value = count
        labels = {"engine": "0", "model_name": model}
        for family, count in zip(self._vllm, (self._drafts, self._drafted_tokens, self._accepted_tokens)):
            family.series(**labels).value = count
        for position, count in enumerate(self._positions or [0]):
            self._vllm_by_position.series(**labels, position=str(position)).value = count
        if views:
            self._gauges(views)

    def _gauges(self, views: Sequence[View]) -> None:
        """Of several replicas the first speaks for the machine; guards are told apart by replica."""
        first = views[0].controller
        self._budget.value, self._asked.value = first.budget if first.guessing else 0, first.asked if first.guessing else 0
        self._price.value, self._gain.value, self._drift.value = first.price, first.gain, first.drift
        self._expected.value, self._measured.value = first.expected_seconds, first.measured_seconds
        self._floor.value = first.costs[0][2] if first.costs else 0.0
        for replica, view in enumerate(views):
            for least, guard in view.controller.guards.items():
                labels = {"replica": str(replica), "sequences": str(least)}
                self._guards.series(**labels).value = STATES[guard.state]
                self._openings.series(**labels).value = guard.openings


def _add(known: list[int], more: Sequence[int]) -> None:
    known += [0] * (len(more) - len(known))
    for position, count in enumerate(more):
        known[position] += count
