"""The dashboard draws: every query asks for series that a live server has, with labels that they have."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.front import serve
from tests.server.test_speculation import joined

ROOT = Path(__file__).resolve().parents[2]
BOARD = ROOT / "deploy" / "grafana" / "forerun.json"
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([^}]*)\})?\[|([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")
TGI_QUERIES = {
    *("tgi_request_count", "tgi_request_success", "tgi_request_failure", "tgi_request_duration_bucket"),
    *("tgi_request_queue_duration_bucket", "tgi_request_mean_time_per_token_duration_bucket", "tgi_request_input_length_bucket"),
    *("tgi_request_generated_tokens_bucket", "tgi_request_generated_tokens_count", "tgi_request_generated_tokens_sum"),
    *("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens", "tgi_batch_concat"),
    *(f"tgi_batch_{part}_duration_bucket" for part in ("concat", "decode", "filter", "forward", "inference")),
}
"""what TGI's own dashboard asks for, except the buckets of `tgi_request_skipped_tokens`, which are in no exposition: it is a summary"""


def used(expression: str) -> dict[str, set[str]]:
    """Series that an expression selects, with the labels that it filters or groups by."""
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r"\s*,\s*", group)}
    found: dict[str, set[str]] = defaultdict(set)
    for name, filters, plain, more in SELECTOR.findall(expression):
        found[name or plain] |= set(re.findall(r"(\w+)\s*[=!]~?", filters or more)) | grouped
    return {name: labels - {"instance"} for name, labels in found.items()}


async def exposed() -> dict[str, set[str]]:
    """Series of a live server that guesses, with their labels."""
    found: dict[str, set[str]] = defaultdict(set)
    async with serve() as front:
        await joined(front)
        page = (await front.get("/metrics"))[1].decode()
    for line in page.splitlines():
        if not line.startswith("#"):
            found[re.split(r"[{ ]", line)[0]] |= set(re.findall(r'(\w+)="', line))
    assert text_string_to_metric_families(page)
    return found


def panels() -> list[Any]:
    return [panel for panel in json.loads(BOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


async def test_every_query_finds_its_series_and_labels() -> None:
    live = await exposed()
    assert len(expressions()) > 60
    for expression in expressions():
        asked = used(expression)
        assert asked, expression
        for name, labels in asked.items():
            assert name in live, f"{expression}: no series {name}"
            assert labels <= live[name], f"{expression}: {name} has no {labels - live[name]}"


def test_what_tgis_dashboard_asks_for_is_asked_for_here() -> None:
    asked = {name for expression in expressions() for name in used(expression)}
    assert asked >= TGI_QUERIES


def test_queries_are_balanced_and_panels_do_not_overlap() -> None:
    for expression in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(BOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_the_file_is_what_its_tool_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_grafana", ROOT / "tools" / "make_grafana.py")
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert json.loads(BOARD.read_text()) == tool.dashboard(), "run `python tools/make_grafana.py > deploy/grafana/forerun.json`"


async def test_alerts_ask_for_series_that_there_are() -> None:
    live = await exposed()
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    asked = {name: labels for rule in rules for name, labels in used(rule["expr"]).items() if name != "up"}
    assert {"forerun_worker_deaths_total", "tgi_request_failure", "forerun_time_to_first_token_seconds_bucket"} <= asked.keys()
    for name, labels in asked.items():
        assert labels <= live[name], name


async def test_the_page_for_operators_has_every_metric_and_no_other() -> None:
    async with serve() as front:
        await joined(front)
        page = (await front.get("/metrics"))[1].decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    text = (ROOT / "docs" / "operations.md").read_text()
    told: dict[str, str] = {}
    for names, kind in re.findall(
        r"^\| ((?:`[a-z_:]+(?:\{[\w,]+\})?`(?:, )?)+) \| ((?:counter|gauge|histogram|summary)(?:, \w+)?) \|", text, re.MULTILINE
    ):
        found = re.findall(r"`([a-z_:]+)", names)
        each = kind.split(", ")
        told |= dict(zip(found, each if len(each) > 1 else each * len(found), strict=True))
    empty = {"tgi_batch_filter_duration", "tgi_batch_concat_duration"}
    assert {name: kinds[name] for name in kinds.keys() - empty} == told
    assert all(f"`{name}`" in text for name in empty)
