"""The console: access by key, the cost of a view, and the page in a browser with 0, 1 and 60 nodes.

The browser is Debian's chromium, driven by Playwright. Without them the tests of the page are skipped.
"""

import asyncio
import json
import shutil
import socket
import subprocess
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fake_cluster import FakeCluster, lost, nodes
from starlette.testclient import TestClient

from cluster.files import ClusterError
from cluster.node_live import Seen
from engine.errors import EmberError
from engine.model.folder import load_model_config
from engine.text.tokenizer import Tokenizer
from serve_app.admission.key_file import add_key
from serve_app.console import planner, planning, state
from serve_app.console.cluster_view import ClusterView, View
from serve_app.dialects.generation_bodies import ChatRequest, parse_request
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

KEY = "the key of the settings"


@pytest.fixture
def cluster(minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    made = FakeCluster(Tokenizer.load(minilm, load_model_config(minilm)), tmp_path, 1)
    view = ClusterView(lambda: made.look())
    monkeypatch.setattr(state, "CLUSTER", view)
    monkeypatch.setattr(planning, "CLUSTER", view)
    return made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def client_of(cluster: FakeCluster, **settings: Any) -> TestClient:
    return TestClient(Api(cluster, Settings(**settings), Metrics("fake")).app)


def test_the_page_needs_no_key_and_brings_nothing_from_elsewhere(cluster: FakeCluster) -> None:
    client = client_of(cluster, api_key=KEY)
    page = client.get("/console")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(each.strip().split(" ", 1) for each in page.headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'",
        "img-src": "'self' data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    script = client.get("/console/console.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert client.get("/console/console.js", headers={"If-None-Match": script.headers["etag"]}).status_code == 304
    for name in ("nothing.js", "..%2Fpage.py", "page.py"):
        assert client.get(f"/console/{name}").status_code == 404


def test_all_data_needs_a_key_and_shows_a_key_its_own_models_and_usage(cluster: FakeCluster, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    ann, ben = add_key(file, "ann", {"models": "fake-embedding"}), add_key(file, "ben")
    with client_of(cluster, api_key=KEY, api_keys_file=str(file)) as client:
        for path in ("/console/state", "/console/usage"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers=bearer("another")).status_code == 401

        def models(key: str) -> list[str]:
            return [model["id"] for model in client.get("/console/state", headers=bearer(key)).json()["models"]]

        assert models(ann) == ["fake-embedding"]
        assert len(models(ben)) == 4  # ann's answer is kept for a second, but not for ben
        for key in (ann, ben):
            assert (
                client.post("/embed", json={"inputs": "text", "model": "fake-embedding"}, headers=bearer(key)).status_code == 200
            )

        def usage(key: str) -> list[tuple[str, int]]:
            found = client.get("/console/usage", headers=bearer(key)).json()["usage"]
            return [(each["key"], each["requests"]) for each in found]

        assert usage(ann) == [("ann", 1)]
        assert usage(KEY) == [("ann", 1), ("ben", 1)]


def test_ten_viewers_share_a_state(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_FRESH_S", 3600.0)
    made, overview = [], cluster.overview
    monkeypatch.setattr(cluster, "overview", lambda: made.append(1) or overview())
    client = client_of(cluster)
    assert len({client.get("/console/state").content for _ in range(10)}) == 1
    assert len(made) == 1


MODELS = """
models:
  - {name: embed, model: BAAI/bge-m3, min_replicas: %d}
  - {name: chat, model: Qwen/Qwen3-4B}
"""


def planned(models: str, *seen: Seen) -> dict[str, Any]:
    return planner.planned(planner.Question(models, tuple(each.node for each in seen if each.node), frozenset({"/models/a"})))


def test_a_plan_shows_places_and_what_does_not_fit() -> None:
    found = planned(MODELS % 1, *nodes(1))
    assert found["complete"]
    assert {(each["model"], each["node"]) for each in found["replicas"]} == {("embed", "node-01"), ("chat", "node-01")}
    found = planned(MODELS % 500, *nodes(3))
    assert (found["complete"], [each["model"] for each in found["unplaced"]]) == (False, ["embed"])
    assert found["unplaced"][0]["ways_out"]
    assert found["summary"][0] == "Some replicas have no place: of embed"
    assert len(planned(MODELS % 3, *nodes(60))["cards"]) == 80


def test_a_plan_uses_the_nodes_that_models_find() -> None:
    def used(*seen: Seen) -> tuple[Any, list[str]]:
        notes: list[str] = []
        return planning._nodes(View(1000.0, seen), notes), notes

    two = nodes(2)
    assert used(*two) == (tuple(each.node for each in two), [])
    assert used(two[0], lost(two[1])) == ((two[0].node,), ["node node-02 is dead (The node stopped answering): not planned"])
    assert used(replace(two[0], labels={})) == ((two[0].node,), [])  # the machine of `emberforge serve`
    assert used(two[0], replace(two[1], labels={}))[0] == (two[0].node,)
    with pytest.raises(ClusterError, match="the cluster has no node that can be planned"):
        used()
    with pytest.raises(ClusterError, match="has not seen the nodes yet"):
        planning._nodes(View(), [])
    assert planning._nodes(View(1000.0, problem="no Ray"), []) is None


@pytest.mark.parametrize(
    ("models", "error"),
    [
        ("models: [", "models.yaml cannot be read: .*line 1"),
        ("models:\n  - name: a\n    model: BAAI/bge-m3\n    dtyp: float32", r"models.yaml, line 4: models.0.dtyp is not a key"),
        ("models:\n  - name: a\n    model: b\n    min_replicas: -1", "models.yaml, line 4: models.0.min_replicas = -1"),
        ("models:\n  - name: a\n    model: /etc", "model a is the path /etc, but the console reads only paths"),
        ("models:\n  - {name: a, model: b/c, backend: transformers, trust_remote_code: true}", "the console runs no code"),
        ("models:\n  - {name: a, model: nobody/nothing}", "nobody/nothing"),
        ("models:\n  - {name: a, model: BAAI/bge-m3, nodes: [moon]}", "moon"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_planned_is_told_by_line_and_name(models: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EmberError, match=error):
        planned(models, *nodes(1))


@pytest.mark.slow
def test_a_process_beside_the_server_makes_one_plan_at_a_time(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CLUSTER", SimpleNamespace(read=cluster.look))
    monkeypatch.setattr(planning, "_LONGEST_S", 600.0)  # a busy machine needs longer than a user waits
    transport = httpx.ASGITransport(Api(cluster, Settings(api_key=KEY), Metrics("fake")).app)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=None) as client:

            async def post(models: str, **headers: str) -> httpx.Response:
                return await client.post("/console/plan", json={"models": models}, headers=headers)

            assert (await post(MODELS % 1)).status_code == 401
            assert (await post("#" * 70_000, **bearer(KEY))).status_code == 422
            first = asyncio.create_task(post(MODELS % 1, **bearer(KEY)))
            while not planning._one_at_a_time.locked():
                await asyncio.sleep(0)
            second = await post(MODELS % 1, **bearer(KEY))
            assert (second.status_code, second.headers["retry-after"]) == (429, "5")
            assert not first.done()
            assert (await first).json()["complete"]
            wrong = await post("models:\n  - {name: a}", **bearer(KEY))
            assert (wrong.status_code, wrong.json()["error"]) == (422, "models.yaml, line 2: models.0.model is missing")
            # Each list holds the previous list ten times: ten lines give ten billion values.
            bomb = "".join(f"a{each}: &a{each} [{', '.join([f'*a{each - 1}' if each else 'x'] * 10)}]\n" for each in range(10))
            assert (await post(f"{bomb}models: *a9", **bearer(KEY))).status_code == 422
            monkeypatch.setattr(planning, "_LONGEST_S", 0.01)
            late = await post(MODELS % 1, **bearer(KEY))
            assert (late.status_code, late.json()["error"].partition(";")[0]) == (422, "the plan took longer than 0.01 s")

    asyncio.run(ask())


FORM = {"model": "fake-generation", "system": " ", "message": "Hi", "most": "8", "temperature": "0.5", "tools": "", "schema": ""}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}}


def in_node(code: str, **values: Any) -> Any:
    """Returns the value of `code`, which may use the functions of conversation.js and these values."""
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    module = (files("serve_app.console") / "static" / "conversation.js").read_bytes()
    script = (
        f"import * as page from 'data:text/javascript;base64,{b64encode(module).decode()}';"
        f"const v = {json.dumps(values)}; console.log(JSON.stringify((() => {{ {code} }})()));"
    )
    command = [node, "--input-type=module", "--eval", script]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


def test_the_chat_form_makes_the_request_of_its_fields(cluster: FakeCluster) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    plain, full, wrong = in_node(
        "const of = (more) => page.bodyOf({ ...v.form, history: [], ...more });"
        "let wrong; try { of({ tools: '[' }); } catch (error) { wrong = error.message; }"
        "return [of({}), of({ system: 'Be brief.', tools: JSON.stringify([v.tool]), schema: JSON.stringify(v.schema) }), wrong];",
        form=FORM,
        tool=TOOL,
        schema=schema,
    )
    user = {"role": "user", "content": "Hi"}
    assert plain == {"model": "fake-generation", "messages": [user], "max_tokens": 8, "temperature": 0.5}
    assert full == plain | {
        "messages": [{"role": "system", "content": "Be brief."}, user],
        "tools": [TOOL],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    assert wrong.startswith("The field tools is no JSON: ")
    taken = parse_request(ChatRequest, json.dumps(full).encode())
    assert taken.response_format is not None
    assert taken.tools
    with client_of(cluster) as client:
        assert client.post("/v1/chat/completions", json=plain).status_code == 200


def test_the_next_request_has_the_calls_of_tools_and_a_result_for_each() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "Let me", "reasoning_content": "Let me"},
        {"reasoning": " see.", "reasoning_content": " see."},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '{"city": '}},
                {"index": 1, "id": "c2", "function": {"name": "weather"}},
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}, {"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    events: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    answer, brings, body = in_node(
        "const answer = { text: '', reasoning: '', calls: [] }, brings = v.events.map((each) => page.addEvent(answer, each));"
        "const history = page.turnsOf({ role: 'user', content: 'Weather?' }, answer.text, answer.calls);"
        "return [answer, brings, page.bodyOf({ ...v.form, history })];",
        form=FORM,
        events=[*events, {"choices": [], "usage": {}}],
    )
    assert (answer["text"], answer["reasoning"]) == ("", "Let me see.")
    assert brings == [False, True, True, True, True, True, False, False]
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    calls = body["messages"][1]["tool_calls"]
    assert [(each["id"], each["function"]["arguments"]) for each in calls] == [("c1", '{"city": "Rome"}'), ("c2", "{}")]
    assert [message["tool_call_id"] for message in body["messages"][2:4]] == ["c1", "c2"]
    assert len(parse_request(ChatRequest, json.dumps(body).encode()).messages) == 5


def test_nobody_looks_at_the_cluster_unless_somebody_watches() -> None:
    looks: list[int] = []

    def look() -> View:
        looks.append(1)
        raise RuntimeError("the head is gone")

    view = ClusterView(look)
    assert not looks
    view.read()
    until(lambda: view._view.problem is not None)
    for _ in range(10):  # the next look is due in seconds
        view.read()
    assert looks == [1]


def until(condition: Callable[[], bool]) -> None:
    end = monotonic() + 20
    while not condition():
        assert monotonic() < end
        sleep(0.01)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def address(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with a key. Each request for its state gets a new answer."""
    monkeypatch.setattr(state, "_FRESH_S", 0.0)
    monkeypatch.setattr("serve_app.console.cluster_view._PAUSE_S", 0.0)
    monkeypatch.setattr("serve_app.console.cluster_view._PAUSES_A_LOOK", 0)
    listening = socket.create_server(("127.0.0.1", 0))
    app = Api(cluster, Settings(api_key=KEY), Metrics("fake")).app
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/console"
    server.should_exit = True
    thread.join(10)
    listening.close()


@pytest.mark.slow
def test_the_page_in_a_browser(browser: Any, cluster: FakeCluster, address: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    own = address.removesuffix("console")
    page.on("request", lambda request: request.url.startswith(own) or problems.append(request.url))
    page.goto(address)

    # The page refuses a wrong key. The right key opens the page.
    page.get_by_label("Key", exact=True).fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_text("does not accept this key").wait_for()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    page.locator(".node").wait_for()

    # 60 nodes join, one is lost while the page is open, and all leave.
    cluster.nodes = nodes(60)
    page.locator(".node").nth(59).wait_for()
    cluster.nodes = (*cluster.nodes[:30], lost(cluster.nodes[30]), *cluster.nodes[31:])
    page.locator(".node.lost", has_text="node-31").wait_for()
    assert "node-31" in page.locator(".node").first.inner_text()
    assert page.get_by_role("status").filter(has_text="Not answering: node-31").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cluster.nodes = ()
    page.get_by_text("Ray knows no node.").wait_for()

    page.get_by_role("link", name="Embed").click()
    texts = page.get_by_label("Texts, one per line")
    texts.evaluate("area => { area.value = Array.from({length: 10000}, (_, i) => `text ${i}`).join('\\n'); }")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("10000 texts, 16 numbers each.").wait_for(timeout=60_000)
    page.get_by_role("button", name="Copy as Python").click()
    assert "os.environ['EMBERFORGE_API_KEY']" in page.locator("#code-field").input_value()
    page.get_by_role("button", name="Close").click()

    page.get_by_role("link", name="Rerank").click()
    page.get_by_role("button", name="Run").click()
    page.get_by_role("cell", name="The stock market fell").wait_for()
    page.get_by_role("link", name="Classify").click()
    page.get_by_role("button", name="Run").click()
    page.get_by_role("cell", name="glad").first.wait_for()
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("button", name="Run").click()
    page.get_by_text("An answer of the model").wait_for()
    cluster.nodes = nodes(60)
    page.get_by_role("link", name="Plan").click()
    page.get_by_label("models.yaml").fill(MODELS % 3000)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("Some replicas have no place: of embed").wait_for(timeout=60_000)
    assert page.get_by_role("region", name="Cards of the plan").get_by_role("row").count() == 81
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_label("models.yaml").fill("models:\n  - {name: a}")
    page.get_by_role("button", name="Plan").click()
    page.get_by_role("alert").filter(has_text="models.yaml, line 2: models.0.model is missing").wait_for()
    page.get_by_role("link", name="Usage").click()
    page.get_by_role("cell", name="fake-embedding").wait_for()
    assert problems == []
