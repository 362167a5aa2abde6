"""Writes the dashboards beside this file: python cluster/deploy/grafana/dashboards.py. Grafana imports the JSON files.

A panel is a title, a unit of Grafana's, and the expressions by legend. A test runs each expression against a Prometheus that
scrapes a running server.
"""

import json
from pathlib import Path
from typing import Any

Panel = tuple[str, str, dict[str, str]]

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
RATE = "[$__rate_interval]"


def rate(series: str, by: str, where: str = "") -> str:
    """The sum of the rates of a counter."""
    return f"sum by ({by}) (rate({series}{{{where}}}{RATE}))"


def quantile(q: float, histogram: str, by: str = "", where: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, where)})"


def mean(histogram: str, by: str, where: str = "") -> str:
    return f"{rate(f'{histogram}_sum', by, where)} / {rate(f'{histogram}_count', by, where)}"


def quantiles(histogram: str, where: str) -> dict[str, str]:
    return {f"p{100 * q:g}": quantile(q, histogram, where=where) for q in (0.5, 0.95, 0.99)}


HERE = 'instance=~"$instance"'
POOL, BY_POOL, REPLICA = f'{HERE},pool!=""', "{{pool}}", "{{pool}} {{replica}}"

SERVER: list[Panel] = [
    ("Requests", "reqps", {"{{route}} {{status}}": rate("emberforge_requests_total", "route, status", HERE)}),
    ("Time of a request", "s", quantiles("emberforge_request_seconds", HERE)),
    ("Requests in flight", "short", {"{{model}} {{replica}}": f"emberforge_requests_in_flight{{{HERE}}}"}),
    (
        "Refusals (429)",
        "reqps",
        {
            "HAProxy": rate("haproxy_backend_requests_denied_total", "instance", f'{HERE},proxy=~"http-.+"'),
            "processes": rate("emberforge_rejected_requests_total", "instance", HERE),
        },
    ),
    ("Wait for the first pass", "s", quantiles("emberforge_queue_seconds", HERE)),
    ("Tokens in the queue", "short", {BY_POOL: f"sum by (pool) (emberforge_queue_tokens{{{POOL}}})"}),
    ("Tokens/s", "short", {BY_POOL: rate("emberforge_tokens_total", "pool", POOL)}),
    ("Tokens in a pass", "short", {BY_POOL: mean("emberforge_batch_tokens", "pool", POOL)}),
    ("Sequences in a pass", "short", {BY_POOL: mean("emberforge_batch_sequences", "pool", POOL)}),
    ("Time of a pass, p95", "s", {BY_POOL: quantile(0.95, "emberforge_batch_seconds", "pool", POOL)}),
    (
        "Share of the time that the engine computes",
        "percentunit",
        {REPLICA: rate("emberforge_batch_seconds_sum", "pool, replica", POOL)},
    ),
    ("Generated tokens/s", "short", {"tokens": rate("emberforge_generated_tokens_total", "instance", HERE)}),
    ("Time to the first token", "s", quantiles("emberforge_first_token_seconds", HERE)),
    ("KV pages held", "percentunit", {REPLICA: f"emberforge_kv_pages_held{{{HERE}}} / emberforge_kv_pages{{{HERE}}}"}),
    (
        "Vectors from the cache",
        "reqps",
        {
            "hits": rate("emberforge_cache_hits_total", "instance", HERE),
            "misses": rate("emberforge_cache_misses_total", "instance", HERE),
        },
    ),
    (
        "Memory of the device",
        "bytes",
        {
            "{{model}} {{replica}} used": f"emberforge_memory_used_bytes{{{HERE}}}",
            "{{model}} {{replica}} planned": f"emberforge_memory_planned_bytes{{{HERE}}}",
        },
    ),
    ("Memory of the host", "bytes", {REPLICA: f"process_resident_memory_bytes{{{HERE}}}"}),
    (
        "Batches halved for lack of memory",
        "short",
        {BY_POOL: f"sum by (pool) (increase(emberforge_split_batches_total{{{POOL}}}{RATE}))"},
    ),
    ("CPU cores", "short", {REPLICA: rate("process_cpu_seconds_total", "pool, replica", HERE)}),
    ("Delay of the event loop", "s", {"{{model}} {{replica}}": f"emberforge_event_loop_delay_seconds{{{HERE}}}"}),
    ("Connections of HAProxy", "short", {"connections": f"haproxy_process_current_connections{{{HERE}}}"}),
    ("Tokens/s of API keys", "short", {"{{key}}": rate("emberforge_key_tokens_total", "key", HERE)}),
    ("Refusals of API keys", "reqps", {"{{key}}": rate("emberforge_key_refusals_total", "key", HERE)}),
    (
        "Clients that left, did not read, or got a broken stream",
        "reqps",
        {
            "left": rate("emberforge_cancelled_requests_total", "instance", HERE),
            "did not read": rate("emberforge_unread_answers_total", "instance", HERE),
            "got an error in a stream": rate("emberforge_broken_streams_total", "instance", HERE),
        },
    ),
]

FAILED = 'status=~"424|5..|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED"'
QUEUED_S = "max by (pool) (emberforge_pool_queue_tokens / emberforge_pool_tokens_per_second)"
# The series have different labels, so `or` has all of both.
FAILED_REQUESTS = f"rate(emberforge_requests_total{{{FAILED}}}{RATE}) or rate(emberforge_broken_streams_total{RATE})"
FAILURES = f"sum by (job) ({FAILED_REQUESTS}) / {rate('emberforge_requests_total', 'job')}"
BUSY = f'avg by (pool) (rate(emberforge_batch_seconds_sum{{pool!=""}}{RATE}))'
PAGES_HELD = "sum by (pool) (emberforge_kv_pages_held) / sum by (pool) (emberforge_kv_pages)"
STARTS = 'process_start_time_seconds{pool!=""}'
ENDED = f"count by (pool) (count_over_time({STARTS}[15m])) - count by (pool) ({STARTS})"
CLUSTER: list[Panel] = [
    ("Nodes that answer", "short", {"nodes": 'sum(up{job="emberforge"})', "of": 'count(up{job="emberforge"})'}),
    ("Replicas", "short", {BY_POOL: "max by (pool) (emberforge_pool_replicas)"}),
    ("Seconds of work in the queue", "s", {BY_POOL: QUEUED_S}),
    ("Requests", "reqps", {"{{instance}}": rate("emberforge_requests_total", "instance")}),
    ("Share of the requests that fail", "percentunit", {"failed": FAILURES}),
    (
        "Refusals (429)",
        "reqps",
        {
            "{{instance}} HAProxy": rate("haproxy_backend_requests_denied_total", "instance", 'proxy=~"http-.+"'),
            "{{instance}} processes": rate("emberforge_rejected_requests_total", "instance"),
        },
    ),
    ("Time of a request, p95", "s", {"{{instance}}": quantile(0.95, "emberforge_request_seconds", "instance")}),
    ("Tokens/s", "short", {BY_POOL: rate("emberforge_tokens_total", "pool", 'pool!=""')}),
    ("Share of the time that engines compute", "percentunit", {BY_POOL: BUSY}),
    ("KV pages held", "percentunit", {BY_POOL: PAGES_HELD}),
    (
        "Memory of the device, share of the plan",
        "percentunit",
        {"{{instance}} {{pool}} {{replica}}": "emberforge_memory_used_bytes / emberforge_memory_planned_bytes"},
    ),
    (
        "Replicas that ended within 15 minutes",
        "short",
        {BY_POOL: ENDED},
    ),
    ("Delay of the event loop, worst", "s", {"{{instance}}": "max by (instance) (emberforge_event_loop_delay_seconds)"}),
    (
        "Processes",
        "short",
        {
            "{{instance}} answer": "emberforge_node_processes",
            "{{instance}} are silent": "emberforge_node_silent_processes",
        },
    ),
    ("Tokens/s of API keys, the most", "short", {"{{key}}": f"topk(10, {rate('emberforge_key_tokens_total', 'key')})"}),
]

TEI: list[Panel] = [
    ("Requests", "reqps", {"{{method}}": rate("te_request_count", "method", HERE)}),
    ("Answers", "reqps", {"{{method}}": rate("te_request_success", "method", HERE)}),
    ("Failures", "reqps", {"{{err}}": rate("te_request_failure", "err", HERE)}),
    ("Inputs", "reqps", {"embedded": rate("te_embed_count", "job", HERE), "predicted": rate("te_predict_count", "job", HERE)}),
    ("Time of a request", "s", quantiles("te_request_duration", HERE)),
    ("Time of tokenization", "s", quantiles("te_request_tokenization_duration", HERE)),
    ("Time in the queue", "s", quantiles("te_request_queue_duration", HERE)),
    ("Time of inference", "s", quantiles("te_request_inference_duration", HERE)),
    ("Tokens of an input", "short", quantiles("te_request_input_length", HERE)),
    ("Inputs in the queue", "short", {"inputs": f"sum by (instance) (te_queue_size{{{HERE}}})"}),
    ("Inputs in a batch", "short", {"mean": mean("te_batch_next_size", "instance", HERE)}),
    ("Tokens in a batch", "short", {"mean": mean("te_batch_next_tokens", "instance", HERE)}),
]

# By name of the file: the title, the panels, and the series whose instances the variable `instance` offers. "" is no variable.
DASHBOARDS = {
    "server": ("emberforge: one node", SERVER, "emberforge_node_processes"),
    "cluster": ("emberforge: cluster", CLUSTER, ""),
    "tei": ("emberforge and text-embeddings-inference: te_* series", TEI, "te_request_count"),
}


def dashboard(name: str, title: str, panels: list[Panel], instances_of: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    variables: list[dict[str, Any]] = [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
    if instances_of:
        variables.append(
            {
                "name": "instance", "label": "Node", "type": "query", "datasource": source, "refresh": 2, "multi": True,
                "includeAll": True, "allValue": ".*", "query": f"label_values({instances_of}, instance)",
            }
        )  # fmt: skip
    return {
        "uid": f"emberforge-{name}",
        "title": title,
        "tags": ["emberforge"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables},
        "panels": [_panel(index, source, *panel) for index, panel in enumerate(panels)],
    }


def _panel(index: int, source: dict[str, str], title: str, unit: str, expressions: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "id": index + 1,
        "title": title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {"x": WIDTH * column, "y": HEIGHT * row, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": source, "expr": expr, "legendFormat": legend}
            for number, (legend, expr) in enumerate(expressions.items())
        ],
    }


def texts() -> dict[Path, str]:
    """Each dashboard's file with its content."""
    return {
        Path(__file__).with_name(f"{name}.json"): json.dumps(dashboard(name, *given), indent=1) + "\n"
        for name, given in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for file, text in texts().items():
        file.write_text(text, encoding="utf-8")
