"""Prometheus itself reads our metrics, our configuration and the dashboard's queries, and its alerts fire when they should and not else.

With Debian's package `prometheus`; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_grafana import ROOT, expressions
from tests.e2e.server import Server, echo_folder, free_port, running
from tests.server.front import serve
from tests.server.test_speculation import joined

PROMETHEUS = ROOT / "deploy" / "prometheus"
pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: install Debian's package prometheus")
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}


def promtool(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *words], input=text, capture_output=True, text=True, timeout=60, check=False)


def plain(expression: str) -> str:
    """A query of the dashboard as Grafana sends it."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


async def test_the_metrics_are_as_prometheus_wants_them() -> None:
    """But for the names of TGI and vLLM, which are as they are, nothing is found fault with."""
    async with serve() as front:
        await joined(front)
        page = (await front.get("/metrics"))[1].decode()
    checked = await asyncio.to_thread(promtool, "check", "metrics", text=page)
    faults = [line for line in checked.stderr.splitlines() if not line.startswith(("tgi_", "vllm:"))]
    assert checked.returncode in (0, 3) and not faults, faults


def test_the_configuration_is_read() -> None:
    checked = promtool("check", "config", str(PROMETHEUS / "prometheus.yaml"))
    assert checked.returncode == 0 and "SUCCESS: 4 rules found" in checked.stdout, checked.stderr + checked.stdout


def test_every_query_of_the_dashboard_is_read(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": plain(expression)} for number, expression in enumerate(expressions())]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = promtool("check", "rules", "--lint=none", str(file))
    assert checked.returncode == 0 and f"SUCCESS: {len(rules)} rules found" in checked.stdout, checked.stderr + checked.stdout


AT = 'instance="a:80",job="forerun"'
CASES: dict[str, tuple[dict[str, str], set[str]]] = {
    "all is well": ({"up": "1x20", "tgi_request_count": "0+100x20", 'tgi_request_failure|err="overloaded"': "0+0x20"}, set()),
    "it is down": ({"up": "0x20"}, {"ForerunDown"}),
    "a worker died": ({"forerun_worker_deaths_total": "0x15 1x5"}, {"ForerunWorkerDied"}),
    "two in a hundred are refused": (
        {"tgi_request_count": "0+100x20", 'tgi_request_failure|err="overloaded"': "0+2x20"},
        {"ForerunOverloaded"},
    ),
    "one in two hundred is": ({"tgi_request_count": "0+200x20", 'tgi_request_failure|err="overloaded"': "0+1x20"}, set()),
    "two in a hundred are wrong": ({"tgi_request_count": "0+100x20", 'tgi_request_failure|err="validation"': "0+2x20"}, set()),
    "first tokens are slow": (
        {f'forerun_time_to_first_token_seconds_bucket|le="{le}"': f"0+{count}x20" for le, count in (("5", 90), ("10", 100), ("+Inf", 100))},
        {"ForerunSlow"},
    ),
    "they are quick": (
        {
            f'forerun_time_to_first_token_seconds_bucket|le="{le}"': f"0+{count}x20"
            for le, count in (("0.1", 90), ("5", 100), ("+Inf", 100))
        },
        set(),
    ),
}
"""by what happens: series a minute apart, and what fires in the end"""


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    rules = PROMETHEUS / "alerts.yaml"
    names = [rule["alert"] for rule in yaml.safe_load(rules.read_text())["groups"][0]["rules"]]
    tests = []
    for series, firing in CASES.values():
        inputs = [{"series": _labelled(name), "values": values} for name, values in series.items()]
        # What an alert says is not looked at here: an empty list means silence, and a name that fires is asked for by a count.
        counts = [{"expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)', "eval_time": "19m"} for name in names]
        for count, name in zip(counts, names):
            count["exp_samples"] = [{"labels": "{}", "value": int(name in firing)}]  # type: ignore[assignment]
        tests.append({"interval": "1m", "input_series": inputs, "promql_expr_test": counts})
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    tested = promtool("test", "rules", str(file))
    assert tested.returncode == 0, tested.stderr + tested.stdout


def _labelled(name: str) -> str:
    bare, _, label = name.partition("|")
    return f"{bare}{{{AT}{',' if label else ''}{label}}}"


@contextlib.contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[str]:
    """Our configuration, but that it asks this server, and more often. Yields its address."""
    made: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    made["global"]["scrape_interval"] = "1s"
    made["rule_files"] = [str(PROMETHEUS / "alerts.yaml")]
    made["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(made))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(["prometheus", *options], stdout=log, stderr=log) as process:
        try:
            yield f"http://{address}/api/v1"
        finally:
            process.terminate()


def asked(url: str, query: str) -> list[Any]:
    """What it found; nothing while it starts."""
    try:
        with urllib.request.urlopen(f"{url}/query?query={urllib.parse.quote(plain(query))}", timeout=30) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        assert error.code == 503, error.read()
        return []
    except OSError:
        return []
    return found


EMPTY = re.compile(r"tgi_batch_(concat|filter)_duration|guard_state|speculation|skipped_tokens")
"""what an echo without guesses has nothing of"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_dashboard_draws(tmp_path: Path) -> None:
    """A real Prometheus that asked a real server has something for every query, but for those that are known to stay empty."""
    with running(echo_folder(tmp_path / "echo"), tmp_path / "log", "--echo") as server, prometheus(server, tmp_path) as url:
        missing = expressions()
        for _ in range(60):
            for tokens in (3, 40):
                assert server.ask("/generate", {"inputs": "hello the", "parameters": {"max_new_tokens": tokens}})[0] == 200
            assert server.ask("/generate", {"inputs": "", "parameters": {"max_new_tokens": 0}})[0] == 422
            missing = [expression for expression in missing if not asked(url, expression) and not EMPTY.search(expression)]
            if not missing:
                break
            time.sleep(0.5)
    assert not missing
