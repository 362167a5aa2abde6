"""The expressions of our dashboards and alert rules, and a Prometheus that evaluates them."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from cluster.local_ray import free_port
from loadtests.balancer import DEPLOY

PROMETHEUS = shutil.which("prometheus")
_INTERVAL_S = 0.2
_COMPARISON = re.compile(r" (?:==|>=|>) [\d.]+")


def dashboard_expressions() -> dict[str, str]:
    """The expressions by dashboard, panel and legend. Grafana's variables are replaced by values."""
    found = {}
    for file in sorted((DEPLOY / "grafana").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
                found[f"{file.stem}: {panel['title']}: {target['legendFormat']}"] = expr
    return found


def alert_expressions() -> dict[str, str]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    return {rule["alert"]: rule["expr"] for rule in rules}


def without_comparisons(expression: str) -> str:
    """The parts of an alert's expression without its thresholds."""
    return _COMPARISON.sub("", expression)


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Callable[[str], list[Any]]]:
    """A Prometheus that has scraped `target` three times. Yields a function that evaluates an expression."""
    scrape = {"job_name": "emberforge", "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": f"{_INTERVAL_S * 1000:.0f}ms"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    assert PROMETHEUS is not None
    files = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command = [PROMETHEUS, *files, f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:

                def query(expression: str) -> list[Any]:
                    answer = client.get("/api/v1/query", params={"query": expression}).json()
                    assert answer["status"] == "success", (expression, answer)
                    result: list[Any] = answer["data"]["result"]
                    return result

                _wait(lambda: client.get("/-/ready").status_code == 200)
                _wait(lambda: bool(query("sum_over_time(up[1m]) >= 3")))
                yield query
        finally:
            process.kill()


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "Prometheus does not answer"
        time.sleep(0.05)
