"""The examples of `deploy/` are about this server: their flags, variables, routes and times are those of the code."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp.test_utils import make_mocked_request

from forerun.config import Config, Serving
from forerun.server.app import KEEP_ALIVE_SECONDS, Services, build_app
from forerun.server.events import KEEP_ALIVE_SECONDS as COMMENT_SECONDS
from tests.server.front import FakeRouter, byte_level

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
CLUSTER = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "forerun.yaml").read_text())}
HAPROXY = DEPLOY / "haproxy" / "haproxy.cfg"
DRAIN = Serving().graceful_termination_timeout


async def served(path: str) -> bool:
    tokenizer = byte_level()
    app = build_app(Config.parse(["--model-id", "tiny"], {}), FakeRouter(tokenizer), Services(tokenizer=tokenizer))  # type: ignore[arg-type]
    tokenizer.close()
    found = await app.router.resolve(make_mocked_request("GET", path))
    return found.http_exception is None


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])  # type: ignore[index]


async def test_compose() -> None:
    forerun = COMPOSE["services"]["forerun"]
    command = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in forerun["command"]]
    environ = dict.fromkeys(forerun["environment"], "x")
    assert Config.parse(command, environ).notes == ()
    assert seconds(forerun["stop_grace_period"]) > DRAIN
    assert await served(re.search(r"127\.0\.0\.1:80(/[\w/]+)", forerun["healthcheck"]["test"][-1])[1])  # type: ignore[index]
    assert forerun["read_only"] and "/tmp" in forerun["tmpfs"]
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source == "./data" or (DEPLOY / "compose" / source).is_file(), source


async def test_prometheus_asks_where_the_metrics_are() -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert await served(scrape["metrics_path"])
    assert scrape["static_configs"][0]["targets"] == ["forerun:80"] and "forerun" in COMPOSE["services"]


async def test_kubernetes() -> None:
    pod = CLUSTER["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    environ = {one["name"]: "x" for one in container["env"]}
    config = Config.parse(container["args"], environ)
    assert config.notes == () and config.serving.api_key == "x"
    assert container["ports"][0]["containerPort"] == config.serving.port > 1023, "an ordinary user may bind it everywhere"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert await served(container[probe]["httpGet"]["path"])
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live", "a server that loads or drains must not be killed"
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > DRAIN + pause
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/tmp"}
    labels: dict[str, Any] = pod["metadata"]["labels"]
    assert CLUSTER["Service"]["spec"]["selector"].items() <= labels.items()
    assert CLUSTER["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert CLUSTER["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert await served(pod["metadata"]["annotations"]["prometheus.io/path"])


async def test_haproxy() -> None:
    text = HAPROXY.read_text()
    times = dict(re.findall(r"timeout ([\w-]+) +(\d+)s", text))
    assert int(times["server"]) > 2 * COMMENT_SECONDS and int(times["http-keep-alive"]) < KEEP_ALIVE_SECONDS
    assert await served(re.search(r"http-check send meth GET uri (\S+)", text)[1])  # type: ignore[index]
    hidden = re.search(r"path,url_dec -m beg (.*) }", text)[1].split()  # type: ignore[index]
    for path in ("/debug/live", "/debug/speculation", "/dashboard", "/dashboard/app.js", "/metrics"):
        assert await served(path) and any(path.startswith(one) for one in hidden)


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy here to read its configuration: install Debian's package")
def test_haproxy_reads_it() -> None:
    checked = subprocess.run(["haproxy", "-c", "-f", str(HAPROXY)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
