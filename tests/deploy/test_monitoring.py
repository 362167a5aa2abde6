"""Our files for Prometheus and Grafana, and the table of series in docs/metrics.md."""

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from monitoring import alert_expressions, dashboard_expressions

from cluster.node_metrics import HAPROXY_SERIES, collect
from engine.loop import BatchReport
from loadtests.balancer import DEPLOY
from serve_app.observe.metrics import Metrics
from serve_app.observe.usage import Counts

FOLDER = DEPLOY / "prometheus"
DOCS = (DEPLOY.parent.parent / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (counter|gauge|histogram) \| ", re.MULTILINE)
TYPE = re.compile(r"^# TYPE (\w+) (\w+)$", re.MULTILINE)
NAME = re.compile(r"\b(?:emberforge|haproxy|process|te)_\w+")
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)")


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The type of each series that a node's exposition can have. HAProxy's counters end in `_total`."""
    metrics = Metrics("m")
    metrics.answers_requests = True
    metrics.watch_queue(lambda: 0, lambda: 0, lambda: 0)
    metrics.watch_memory("cpu", 0, lambda: 0)
    metrics.watch_kv_cache(lambda: 0, lambda: 0)
    metrics.observe_usage("key", "m", Counts())
    metrics.observe_batch(BatchReport(num_tokens=1, num_seqs=1, seconds=0.1, num_duplicates=0))
    text = metrics.exposition().decode() + collect(tmp_path_factory.mktemp("node")).decode()
    return dict(TYPE.findall(text)) | {each: "counter" if each.endswith("_total") else "gauge" for each in HAPROXY_SERIES}


def test_the_docs_have_a_row_for_each_series(series: dict[str, str]) -> None:
    assert dict(ROW.findall(DOCS)) == series


def test_expressions_name_series_that_exist(series: dict[str, str]) -> None:
    parts = {f"{name}_{part}" for name, kind in series.items() if kind == "histogram" for part in ("bucket", "sum", "count")}
    used = {name for expr in (dashboard_expressions() | alert_expressions()).values() for name in NAME.findall(expr)}
    assert used - series.keys() - parts == set()


def test_the_dashboards_are_those_of_the_script() -> None:
    texts = runpy.run_path(str(DEPLOY / "grafana" / "dashboards.py"))["texts"]()
    assert {file: file.read_text() for file in texts} == texts
    assert set(texts) == set((DEPLOY / "grafana").glob("*.json"))


def test_the_docs_have_each_alert() -> None:
    assert set(re.findall(r"`(Emberforge\w+)`", DOCS)) == set(alert_expressions())


@needs_promtool
def test_prometheus_takes_the_configurations_and_the_rules(tmp_path: Path) -> None:
    for file in FOLDER.glob("*.yml"):
        shutil.copy(file, tmp_path)
    on_kubernetes = tmp_path / "prometheus-kubernetes.yml"
    # Debian's Prometheus has no Kubernetes discovery.
    text, count = re.subn(r"kubernetes_sd_configs:\n(?: {6}.*\n)+", "static_configs: []\n", on_kubernetes.read_text())
    assert count == 1
    on_kubernetes.write_text(text)
    for file in (tmp_path / "prometheus.yml", on_kubernetes):
        promtool("check", "config", str(file))


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))


def promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
