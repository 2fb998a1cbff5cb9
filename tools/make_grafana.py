"""Writes deploy/grafana/forerun.json: TGI's dashboard with its own queries, and rows for what TGI does not measure.

    python tools/make_grafana.py > deploy/grafana/forerun.json

A panel is its title, its unit and its queries; where it stands follows from the order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

RATE = "[$__rate_interval]"
HERE = '{instance=~"$instance"}'
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Queries = list[tuple[str, str]]
"""legend and expression"""


def chosen(labels: str = "") -> str:
    return f'{{instance=~"$instance",{labels}}}' if labels else HERE


def rate(name: str, by: str = "", labels: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{chosen(labels)}{RATE}))"


def quantiles(name: str, labels: str = "") -> Queries:
    inner = f"sum by (le) (rate({name}_bucket{chosen(labels)}{RATE}))"
    return [(f"p{round(100 * share)}", f"histogram_quantile({share}, {inner})") for share in (0.5, 0.9, 0.99)]


def mean(name: str) -> str:
    return f"{rate(name + '_sum')} / {rate(name + '_count')}"


def summed(name: str, by: str = "", labels: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({name}{chosen(labels)})"


def ratio(above: str, below: str) -> str:
    return f"{above} / {below}"


REQUESTS = [
    ("Requests", "reqps", [("received", rate("tgi_request_count")), ("answered", rate("tgi_request_success"))]),
    ("Failures by reason", "reqps", [("{{err}}", rate("tgi_request_failure", "err"))]),
    ("Answered in full", "percentunit", [("share", ratio(rate("tgi_request_success"), rate("tgi_request_count")))]),
    ("Request latency", "s", quantiles("tgi_request_duration")),
    ("Time in the queue", "s", quantiles("tgi_request_queue_duration")),
    ("Mean time per token", "s", quantiles("tgi_request_mean_time_per_token_duration")),
    ("Time to the first token", "s", quantiles("forerun_time_to_first_token_seconds")),
    ("Time between tokens", "s", quantiles("forerun_inter_token_seconds")),
    ("Throughput", "short", [("generated tokens/s", rate("tgi_request_generated_tokens_sum"))]),
    ("Tokens per prompt", "short", quantiles("tgi_request_input_length")),
    ("Generated tokens per request", "short", quantiles("tgi_request_generated_tokens")),
    ("Mean generated tokens", "short", [("mean", mean("tgi_request_generated_tokens"))]),
]
BATCH = [
    ("Queue and batch", "short", [("waiting", summed("tgi_queue_size")), ("running", summed("tgi_batch_current_size"))]),
    ("Tokens held by the batch", "short", [("tokens", summed("tgi_batch_current_max_tokens"))]),
    ("Joins of a running batch", "ops", [("{{reason}}", rate("tgi_batch_concat", "reason"))]),
    *(
        (f"{title}, {method}", "s", quantiles(f"tgi_batch_{name}_duration", f'method="{method}"'))
        for name, title in (("inference", "Step"), ("forward", "Forward"), ("decode", "Rest of the step"))
        for method in ("prefill", "decode")
    ),
    ("Concatenation (always empty: joining costs nothing)", "s", quantiles("tgi_batch_concat_duration")),
    ("Filtering (always empty: leaving costs nothing)", "s", quantiles("tgi_batch_filter_duration")),
]
MEMORY = [
    ("KV pages in use", "percentunit", [("share", f"max (forerun_kv_usage_ratio{HERE})")]),
    (
        "Prefix cache hits",
        "percentunit",
        [("share of prompt tokens", ratio(rate("forerun_prefix_hit_tokens_total"), rate("forerun_prefix_prompt_tokens_total")))],
    ),
    (
        "Trouble",
        "short",
        [
            ("preemptions", f"sum (increase(forerun_preemptions_total{HERE}{RATE}))"),
            ("worker deaths", f"sum (increase(forerun_worker_deaths_total{HERE}{RATE}))"),
        ],
    ),
]
DRAFTED, ACCEPTED = "forerun_speculation_drafted_tokens_total", "forerun_speculation_accepted_tokens_total"
SPECULATION = [
    ("Guesses that held, by source", "percentunit", [("{{source}}", ratio(rate(ACCEPTED, "source"), rate(DRAFTED, "source")))]),
    ("Guesses that held, by position", "percentunit", [("{{position}}", ratio(rate(ACCEPTED, "position"), rate(DRAFTED, "position")))]),
    (
        "Tokens",
        "short",
        [("committed/s", rate("forerun_committed_tokens_total")), ("of them guessed/s", rate("forerun_accepted_tokens_total"))],
    ),
    ("Guesses accepted in a step", "short", [("mean", mean("tgi_request_skipped_tokens"))]),
    ("Guesses of a draft", "short", [("mean", ratio(rate(DRAFTED), rate("forerun_speculation_drafts_total")))]),
    ("Guard: 0 pays, 1 on trial, 2 off", "short", [("from {{sequences}} sequences", f"forerun_speculation_guard_state{HERE}")]),
    ("Price: least survival that pays", "percentunit", [("price", f"max (forerun_speculation_price{HERE})")]),
    ("Expected gain over plain decoding", "short", [("times", f"max (forerun_speculation_gain{HERE})")]),
    (
        "Step: expected and measured",
        "s",
        [
            ("expected", f"max (forerun_speculation_predicted_step_seconds{HERE})"),
            ("measured", f"max (forerun_speculation_measured_step_seconds{HERE})"),
        ],
    ),
    (
        "Seconds a second spent on guesses",
        "short",
        [("drafting", rate("forerun_speculation_draft_seconds_total")), ("verifying", rate("forerun_speculation_verify_seconds_total"))],
    ),
    ("Failures of the drafter", "short", [("failures", f"sum (increase(forerun_speculation_failures_total{HERE}{RATE}))")]),
]
ROWS = [("Requests", REQUESTS), ("Batch", BATCH), ("Memory", MEMORY), ("Speculation", SPECULATION)]


def panel(number: int, place: dict[str, int], title: str, unit: str, queries: Queries) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for i, (legend, expression) in enumerate(queries)
    ]
    defaults = {"unit": unit, "min": 0, "custom": {"fillOpacity": 8, "lineWidth": 2, "showPoints": "never", "spanNulls": False}}
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": targets,
    }


def panels(rows: Iterable[tuple[str, list[tuple[str, str, Queries]]]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    top = 0
    for heading, members in rows:
        made.append(
            {"id": len(made) + 1, "type": "row", "title": heading, "collapsed": False, "panels": [], "gridPos": _place(top, 0, 1, 24)}
        )
        top += 1
        for index, (title, unit, queries) in enumerate(members):
            line, column = divmod(index, COLUMNS)
            made.append(panel(len(made) + 1, _place(top + line * HEIGHT, column * WIDTH, HEIGHT, WIDTH), title, unit, queries))
        top += -(-len(members) // COLUMNS) * HEIGHT
    return made


def _place(y: int, x: int, h: int, w: int) -> dict[str, int]:
    return {"h": h, "w": w, "x": x, "y": y}


def dashboard() -> dict[str, Any]:
    instance = {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(tgi_queue_size, instance)", "refId": "instances"},
        "definition": "label_values(tgi_queue_size, instance)",
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": "forerun",
        "title": "Forerun",
        "tags": ["forerun", "text-generation-inference"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}, instance]},
        "panels": panels(ROWS),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
