"""The metrics page, read by the official parser: names, types, labels, buckets, and what moves them."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from forerun.router.observer import Load, StepReport
from forerun.server.exposition import Exposition
from forerun.server.metrics import Metrics
from tests.server.front import LIMITS, Front, runs, serve

TGI = {
    "tgi_request_count": "counter",
    "tgi_request_success": "counter",
    "tgi_request_failure": "counter",
    "tgi_request_duration": "histogram",
    "tgi_request_validation_duration": "histogram",
    "tgi_request_queue_duration": "histogram",
    "tgi_request_inference_duration": "histogram",
    "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_request_max_new_tokens": "histogram",
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_skipped_tokens": "summary",
    "tgi_batch_next_size": "histogram",
    "tgi_batch_current_size": "gauge",
    "tgi_batch_current_max_tokens": "gauge",
    "tgi_batch_max_total_tokens": "gauge",
    "tgi_queue_size": "gauge",
    "tgi_batch_inference_count": "counter",
    "tgi_batch_inference_success": "counter",
    "tgi_batch_inference_failure": "counter",
    "tgi_batch_inference_duration": "histogram",
    "tgi_batch_forward_duration": "histogram",
    "tgi_batch_decode_duration": "histogram",
    "tgi_batch_filter_duration": "histogram",
    "tgi_batch_concat": "counter",
    "tgi_batch_concat_duration": "histogram",
}
METHODS, ERRORS = {"prefill", "decode"}, {"overloaded", "validation", "generation", "incomplete", "dropped", "template"}
LABELS = {
    "tgi_request_failure": ("err", ERRORS),
    "tgi_batch_inference_count": ("method", METHODS),
    "tgi_batch_inference_success": ("method", METHODS),
    "tgi_batch_inference_failure": ("method", METHODS),
    "tgi_batch_inference_duration": ("method", METHODS),
    "tgi_batch_forward_duration": ("method", METHODS),
    "tgi_batch_decode_duration": ("method", METHODS),
    "tgi_batch_filter_duration": ("method", METHODS),
    "tgi_batch_concat": ("reason", {"backpressure", "wait_exceeded", "chunking"}),
    "tgi_batch_concat_duration": ("method", {"decode"}),
}
"""of TGI's families those with a label, and its values; the others have none"""
OURS = {
    "forerun_time_to_first_token_seconds",
    "forerun_inter_token_seconds",
    "forerun_kv_pages",
    "forerun_kv_usage_ratio",
    "forerun_prefix_hit_tokens",
    "forerun_prefix_prompt_tokens",
    "forerun_preemptions",
    "forerun_worker_deaths",
    "forerun_step_seconds",
}


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels, as it stands on the page."""
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")}


async def scrape(front: Front) -> dict[str, float]:
    return samples((await front.get("/metrics"))[1].decode())


async def test_every_series_is_there_from_the_first_scrape() -> None:
    """A37: never a page without series. A38: the first token has one of its own."""
    async with serve() as front:
        response, body = await front.get("/metrics")
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        text = body.decode()
        declared = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
        assert TGI.items() <= declared.items()
        found = families(text)
        assert found.keys() >= TGI.keys() | OURS
        assert all(family.samples for family in found.values())


async def test_names_and_labels_are_tgis_to_the_letter() -> None:
    """As they stand on the page: a query for them must find them, whatever a parser makes of them."""
    async with serve() as front:
        text = (await front.get("/metrics"))[1].decode()
    found: dict[str, dict[str, set[str]]] = {}
    for line in text.splitlines():
        name, labels = re.fullmatch(r"(\w[\w:]*)(?:\{(.*)\})? \S+", line).groups() if not line.startswith("#") else ("", "")  # type: ignore[union-attr]
        if name.startswith("tgi_"):
            known = found.setdefault(name, {})
            for label, value in re.findall(r'(\w+)="([^"]*)"', labels or ""):
                known.setdefault(label, set()).add(value)
    wanted: dict[str, dict[str, set[str]]] = {}
    for name, kind in TGI.items():
        label, values = LABELS.get(name, ("", set()))
        common = {label: values} if label else {}
        if kind in ("histogram", "summary"):
            wanted |= {f"{name}_sum": common, f"{name}_count": common}
        if kind == "summary":
            wanted[name] = {"quantile": {"0", "0.5", "0.9", "0.95", "0.99", "0.999", "1"}}
        elif kind == "histogram":
            wanted[f"{name}_bucket"] = common
        else:
            wanted[name] = common
    for name in found:
        found[name].pop("le", None)
    assert found == wanted


async def test_buckets_are_tgis() -> None:
    async with serve() as front:
        page = await scrape(front)

        def bounds(name: str) -> list[str]:
            return [key.split('le="')[1][:-2] for key in page if key.startswith(name + "_bucket")]

        durations = bounds("tgi_request_duration")
        assert len(durations) == 36
        assert (durations[0], durations[-1]) == ("0.00015000000000000001", "+Inf")
        assert durations[4:7] == ["0.000759375", "0.0011390624999999999", "0.0017085937499999998"], "to the last digit: they are labels"
        assert abs(float(durations[-2]) - 0.0001 * 1.5**35) < 1e-9
        assert bounds("tgi_batch_next_size") == [*map(str, range(1, 1025)), "+Inf"]
        assert bounds("tgi_request_input_length")[:2] == ["2", "4"]
        assert [float(bound) for bound in bounds("tgi_request_generated_tokens")[:-1]] == [2.56 * (n + 1) for n in range(100)]


async def test_a_request_moves_its_series_once() -> None:
    async with serve(script=runs([1], [2, 3], [4])) as front:
        for path in ("/generate", "/generate_stream"):
            before = await scrape(front)
            await front.raw(path, {"inputs": "hello", "parameters": {"max_new_tokens": 4}})
            after = await scrape(front)
            moved = {name: after[name] - before[name] for name in after if after[name] != before[name] and "_bucket" not in name}
            for name in ("tgi_request_count", "tgi_request_success", "tgi_request_duration_count", "tgi_request_queue_duration_count"):
                assert moved[name] == 1, name
            assert moved["tgi_request_generated_tokens_sum"] == 4
            assert moved["tgi_request_max_new_tokens_sum"] == 4
            assert moved["tgi_request_input_length_sum"] == 1
            assert moved["forerun_time_to_first_token_seconds_count"] == 1
            assert moved["forerun_inter_token_seconds_count"] == 3
            assert moved["tgi_request_skipped_tokens_count"] == 3
            assert moved["tgi_request_skipped_tokens_sum"] == 1
            assert not any(name.startswith("tgi_request_failure") for name in moved)


async def test_refusals_count_as_failures_not_successes() -> None:
    async with serve() as front:
        await front.post("/generate", {"inputs": "x", "parameters": {"top_p": 2}})
        await front.post("/generate_stream", {"inputs": "x", "parameters": {"best_of": 2}})
        await front.post("/tokenize", {"inputs": "x"})
        page = await scrape(front)
        assert page["tgi_request_count"] == 2
        assert page["tgi_request_success"] == 0
        assert page['tgi_request_failure{err="validation"}'] == 2


def test_the_batcher_moves_the_batch_series() -> None:
    metrics = Metrics()
    metrics.requests.size(LIMITS)
    batch = metrics.batch
    batch.load(Load(waiting=3, running=2, used_pages=4, cached_pages=1, total_pages=10, page_tokens=16))
    batch.admitted(2)
    batch.stepped(StepReport(0.5, 100, 1, 101, 0, 2, 0, 0, 0, 400_000))
    batch.stepped(StepReport(0.25, 0, 2, 2, 4, 5, 4, 3, 50_000, 100_000))
    batch.prefix(32, 100)
    batch.preempted(1)
    batch.worker_died("killed")
    page = samples(metrics.text())
    assert page["tgi_queue_size"] == 3
    assert page["tgi_batch_current_size"] == 2
    assert page["tgi_batch_current_max_tokens"] == 64
    assert page["tgi_batch_max_total_tokens"] == 160
    assert page["tgi_batch_next_size_sum"] == 2
    assert page['tgi_batch_concat{reason="chunking"}'] == 1
    assert page['tgi_batch_inference_count{method="prefill"}'] == 1
    assert page['tgi_batch_inference_success{method="decode"}'] == 1
    assert page['tgi_batch_inference_failure{method="decode"}'] == 1
    assert page['tgi_batch_forward_duration_sum{method="decode"}'] == 0.15
    assert page['forerun_kv_pages{state="free"}'] == 5
    assert page["forerun_kv_usage_ratio"] == 0.4
    assert page["forerun_prefix_hit_tokens_total"] == 32
    assert page["forerun_preemptions_total"] == 1
    assert page["forerun_worker_deaths_total"] == 1
    assert page["forerun_accepted_tokens_total"] == 3
    families(metrics.text())


@given(value=st.floats(), label=st.text())
def test_whatever_a_gauge_holds_is_read_back(value: float, label: str) -> None:
    """A page that one strange number broke would hide all the others."""
    page = Exposition()
    page.family("a", "Help", "gauge").series(name=label).value = value
    (family,) = text_string_to_metric_families(page.text())
    (sample,) = family.samples
    assert repr(sample.value) == repr(float(value)) or sample.value == value
    assert sample.labels == {"name": label}
