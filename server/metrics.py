"""What the server counts: TGI's `tgi_*` series under their names, types, labels and buckets, and ours under `forerun_*`.

Implements the router's Observer. A request is counted once (TGI counts some two or three times). Two families stay at zero because
nothing corresponds to them here: batches are never filtered or concatenated, rows join and leave them; they are kept for dashboards.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.router.observer import Load, StepReport
from forerun.router.service import Limits
from forerun.server.errors import ApiError
from forerun.server.exposition import Exposition, Histogram
from forerun.server.recent import History, Times
from forerun.server.speculation import SpeculationMetrics
from forerun.server.timing import Timing

DURATIONS = list(itertools.accumulate([1.5] * 35, operator.mul, initial=0.0001))[1:]
"""multiplied one after the other, as TGI does: powers differ from it in the last digit, and with it the label `le`"""
METHODS = ("prefill", "decode")
ERRORS = ("overloaded", "validation", "generation", "incomplete", "dropped", "template")
CONCATS = ("backpressure", "wait_exceeded", "chunking")
PAGES = ("used", "cached", "free")


def _hundred_steps(limit: int) -> list[float]:
    return [limit / 100 * (step + 1) for step in range(100)]


class RequestMetrics:
    """Of requests: how many, how they ended, how long and how large they were."""

    def __init__(self, page: Exposition) -> None:
        self._sized = False
        self._count = page.counter("tgi_request_count", "Requests received")
        self._success = page.counter("tgi_request_success", "Requests answered in full")
        self._failure = page.counters("tgi_request_failure", "Requests that ended otherwise", "err", ERRORS)
        self._total = page.histogram("tgi_request_duration", "Seconds from arrival to the last token", DURATIONS)
        self._validation = page.histogram("tgi_request_validation_duration", "Seconds from arrival to the queue", DURATIONS)
        self._queue = page.histogram("tgi_request_queue_duration", "Seconds in the queue", DURATIONS)
        self._inference = page.histogram("tgi_request_inference_duration", "Seconds from the first step to the last token", DURATIONS)
        self._mean = page.histogram("tgi_request_mean_time_per_token_duration", "Seconds of inference per generated token", DURATIONS)
        self._input = page.histogram("tgi_request_input_length", "Tokens of the prompt")
        self._limit = page.histogram("tgi_request_max_new_tokens", "Most tokens that may be generated")
        self._generated = page.histogram("tgi_request_generated_tokens", "Tokens generated")
        # These three are called for each token, so there is no call between the caller and the series.
        self.skipped = page.summary("tgi_request_skipped_tokens", "Guessed tokens accepted in one step of one request").observe
        self.first_token = page.histogram("forerun_time_to_first_token_seconds", "From arrival to the first token", DURATIONS).observe
        self.between_tokens = page.histogram(
            "forerun_inter_token_seconds", "From one token to the next, both of one request", DURATIONS
        ).observe
        """seconds, and how many tokens arrived together after so long"""
        self.first_tokens = Times()
        self.gaps = Times()

    def size(self, limits: Limits) -> None:
        """Lengths are counted in hundredths of the limits, which are known once the worker is ready."""
        if not self._sized:
            self._sized = True
            self._input.resize(_hundred_steps(limits.max_input_tokens))
            self._limit.resize(_hundred_steps(limits.max_total_tokens))
            self._generated.resize(_hundred_steps(limits.max_total_tokens))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Around the handling of one request: counts it, and how it ends unless it ends well (`succeeded` does that)."""
        self._count.add()
        try:
            yield
        except ApiError as error:
            self.failed(error.label)
            raise
        except (asyncio.CancelledError, ConnectionError):
            self.failed("dropped")
            raise
        except Exception:
            self.failed("generation")
            raise

    def counts(self) -> tuple[int, int, int, int]:
        """Requests received, answered in full, failed, and refused for overload."""
        refused = self._failure["overloaded"].value
        failed = sum(series.value for series in self._failure.values()) - refused
        return int(self._count.value), int(self._success.value), int(failed), int(refused)

    def failed(self, label: str) -> None:
        if label:
            self._failure[label].add()

    def admitted(self, input_tokens: int, max_new_tokens: int) -> None:
        self._input.observe(input_tokens)
        self._limit.observe(max_new_tokens)

    def succeeded(self, timing: Timing, generated: int) -> None:
        self._success.add()
        self._total.observe(timing.total)
        self._validation.observe(timing.validation)
        self._queue.observe(timing.queue)
        self._inference.observe(timing.inference)
        self._mean.observe(timing.per_token(generated))
        self._generated.observe(generated)


class BatchMetrics:
    """Of the batcher and its worker. The router's Observer."""

    def __init__(self, page: Exposition) -> None:
        self._next_size = page.histogram(
            "tgi_batch_next_size", "Sequences that a step admitted together", [float(n) for n in range(1, 1025)]
        )
        self._running = page.gauge("tgi_batch_current_size", "Sequences in the batch")
        self._tokens = page.gauge("tgi_batch_current_max_tokens", "Token positions that running sequences hold")
        self._pool = page.gauge("tgi_batch_max_total_tokens", "Token positions in all")
        self._waiting = page.gauge("tgi_queue_size", "Sequences waiting")
        self._count = page.counters("tgi_batch_inference_count", "Steps", "method", METHODS)
        self._success = page.counters("tgi_batch_inference_success", "Steps that ended well", "method", METHODS)
        self._failure = page.counters("tgi_batch_inference_failure", "Steps that ended the worker", "method", METHODS)
        self._duration = self._durations(page, "tgi_batch_inference_duration", "Seconds of a step, seen from the front")
        self._forward = self._durations(page, "tgi_batch_forward_duration", "Seconds of a step spent drafting and verifying")
        self._decode = self._durations(page, "tgi_batch_decode_duration", "Seconds of a step spent otherwise")
        self._durations(page, "tgi_batch_filter_duration", "Always empty: rows leave a batch without copies")
        self._concat = page.counters("tgi_batch_concat", "Steps in which sequences joined a running batch", "reason", CONCATS)
        page.histograms("tgi_batch_concat_duration", "Always empty: rows join a batch without copies", DURATIONS, "method", ["decode"])
        self._pages = page.gauges("forerun_kv_pages", "KV pages by what they hold", "state", PAGES)
        self._usage = page.gauge("forerun_kv_usage_ratio", "Share of the KV pages that running sequences hold")
        self._hits = page.counter("forerun_prefix_hit_tokens_total", "Prompt tokens found in the prefix cache")
        self._asked = page.counter("forerun_prefix_prompt_tokens_total", "Prompt tokens looked up in the prefix cache")
        self._preempted = page.counter("forerun_preemptions_total", "Sequences that gave their pages back and were computed again")
        self._deaths = page.counter("forerun_worker_deaths_total", "Workers that died")
        self._step = page.histogram("forerun_step_seconds", "Seconds of a step", DURATIONS)
        self._committed = page.counter("forerun_committed_tokens_total", "Tokens generated, all requests together")
        self._prefilled = page.counter("forerun_prefill_tokens_total", "Prompt tokens computed")
        self._drafted = page.counter("forerun_drafted_tokens_total", "Tokens guessed")
        self._accepted = page.counter("forerun_accepted_tokens_total", "Guesses that came true")
        self.speculation = SpeculationMetrics(page)
        self.history = History()
        self.committed_steps = 0
        """steps that committed a token; whoever waits for a sign of life watches it grow"""

    def load(self, load: Load) -> None:
        self._running.value = load.running
        self._waiting.value = load.waiting
        self._tokens.value = load.used_pages * load.page_tokens
        self._pool.value = load.total_pages * load.page_tokens
        self._pages["used"].value = load.used_pages
        self._pages["cached"].value = load.cached_pages
        self._pages["free"].value = load.total_pages - load.used_pages - load.cached_pages
        self._usage.value = load.used_pages / load.total_pages if load.total_pages else 0.0
        self.history.load(load, time.monotonic())

    def admitted(self, sequences: int) -> None:
        self._next_size.observe(sequences)
        if self._running.value:
            self._concat["chunking"].add()

    def stepped(self, report: StepReport) -> None:
        method = "prefill" if report.prefill_tokens else "decode"
        forward = (report.draft_us + report.verify_us) / 1e6
        self._count[method].add()
        self._success[method].add()
        self._duration[method].observe(report.seconds)
        self._forward[method].observe(forward)
        self._decode[method].observe(max(0.0, report.seconds - forward))
        self._step.observe(report.seconds)
        self._committed.add(report.tokens)
        self._prefilled.add(report.prefill_tokens)
        self._drafted.add(report.drafted)
        self._accepted.add(report.accepted)
        self.speculation.stepped(report)
        self.history.stepped(report)
        self.committed_steps += report.tokens > 0

    def prefix(self, hit_tokens: int, prompt_tokens: int) -> None:
        self._hits.add(hit_tokens)
        self._asked.add(prompt_tokens)

    def preempted(self, sequences: int) -> None:
        self._preempted.add(sequences)

    def worker_died(self, reason: str) -> None:
        self._deaths.add()
        if self._running.value:
            self._count["decode"].add()
            self._failure["decode"].add()

    @staticmethod
    def _durations(page: Exposition, name: str, help: str) -> dict[str, Histogram]:
        return page.histograms(name, help, DURATIONS, "method", METHODS)


class Metrics:
    """The page of `/metrics`: one family after another, requests first."""

    def __init__(self) -> None:
        self._page = Exposition()
        self.requests = RequestMetrics(self._page)
        self.batch = BatchMetrics(self._page)
        self.lost_spans = self._page.counter("forerun_traces_lost_spans_total", "Spans that the collector of traces did not take")

    def text(self) -> str:
        return self._page.text()
