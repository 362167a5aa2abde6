// The map of the cluster, and its live values.

import { tell } from "./api.js";
import { brief, count, fill, gib, h, seconds, table } from "./dom.js";

const COLOURS = 8;
let lostBefore = new Set();

export function cluster(main, live) {
  const tiles = h("dl", { class: "tiles" }), legend = h("ul", { class: "legend" }), nodes = h("ul", { class: "nodes" });
  const pools = h("div"), replicas = h("div"), about = h("p", { class: "quiet small" }), said = h("p", { class: "quiet" });
  const lost = h("p", { class: "hidden", role: "status" });
  const pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => {
    live.paused = !live.paused;
    pause.setAttribute("aria-pressed", String(live.paused));
    pause.textContent = live.paused ? "Go on" : "Pause";
  } }, live.paused ? "Go on" : "Pause");
  main.append(
    h("section", { "aria-labelledby": "t-live" }, h("div", { class: "row" }, h("h2", { id: "t-live" }, "Live"), pause), tiles, about),
    h("section", { "aria-labelledby": "t-nodes" }, h("h2", { id: "t-nodes" }, "Nodes"), said, lost, legend, nodes),
    h("section", { "aria-labelledby": "t-pools" }, h("h2", { id: "t-pools" }, "Models and pools"), pools),
    h("section", { "aria-labelledby": "t-replicas" }, h("h2", { id: "t-replicas" }, "Replicas"), replicas),
  );

  return (state) => {
    const view = mapped(state);
    showFigures(tiles, state, live.rates);
    const gateways = state.num_gateways ? ` of ${state.num_gateways} gateways` : "";
    const heard = `${live.rates.numProcesses}${gateways || (live.rates.numProcesses === 1 ? " process" : " processes")}`;
    about.textContent = `Rates and latencies cover the last 30 s of ${heard} that answered this page in the last minute. ` +
      `Computed tokens and queues cover all pools. emberforge ${state.version}.`;
    said.textContent = state.problem ?? (state.looked_at ? (view.nodes.length ? "" : "Ray knows no node.") : "The server asks the nodes. This takes some seconds.");
    fill(legend, view.nodes.length ? view.models : [], (model) => model.id, (model) => h("li", {}, h("span", { class: `swatch c${model.colour}` }), model.id));
    fill(nodes, view.nodes, (node) => node.id, showNode);
    const gone = view.nodes.filter((node) => node.state !== "up").map((node) => node.name);
    const fresh = gone.filter((name) => !lostBefore.has(name));
    if (fresh.length) lost.textContent = `Not answering: ${fresh.join(", ")}`;
    lostBefore = new Set(gone);
    keep(pools, poolsTable(state));
    keep(replicas, replicasTable(view));
    tell("");
  };
}

// Puts a new element in the place of the old one, unless both have the same text.
function keep(place, element) {
  if (place.textContent !== element.textContent || !place.firstChild) place.replaceChildren(element);
}

// The state as the map needs it: each node with its cards, and each card with its replicas.
export function mapped(state) {
  const models = state.models.map((model, index) => ({ id: model.id, colour: index % COLOURS }));
  const controller = new Map(state.replicas.map((each) => [each.id, each]));
  const replicas = state.models.flatMap((model, index) => model.pools.flatMap((pool) => pool.replicas.map((each) => {
    const known = controller.get(each.id);
    controller.delete(each.id);
    return { ...each, model: model.id, pool: pool.name, colour: index % COLOURS, state: known?.state ?? "running" };
  })));
  const ofPool = new Map(state.models.flatMap((model, index) => model.pools.map((pool) => [pool.name, { model: model.id, colour: index % COLOURS }])));
  for (const each of controller.values()) {
    const own = ofPool.get(each.pool);
    // The replica of a server of one model reports without Serve's id.
    const same = replicas.find((other) => !other.id && other.pool === each.pool);
    if (same) same.id = each.id;
    else if (own) replicas.push({ ...each, ...own, card: "", silent: true, planned_bytes: 0, used_bytes: 0 });
  }
  const names = new Map(state.nodes.map((node) => [node.id, node.name]));
  for (const each of replicas) each.nodeName = names.get(each.node) ?? (each.node ? each.node.slice(0, 8) : "");
  const order = { dead: 0, silent: 1, up: 2 };
  const nodes = state.nodes.map((node) => {
    const here = replicas.filter((each) => each.node === node.id);
    const cards = (node.cards ?? []).map((card, index) => {
      const uuid = (card.uuid ?? "").replace(/^(GPU|MIG)-/, "");
      const on = here.filter((each) => each.card ? each.card === uuid : card.unified && node.cards.length === 1 && !each.silent);
      return { name: card.name, index, total: card.total_bytes, free: card.free_bytes, parts: parts(on) };
    });
    const onHost = here.filter((each) => !each.card && !each.silent);
    if (node.cards?.length === 0) cards.push({ name: "no GPU: memory of the host", index: 0, total: node.ram_bytes, free: null, parts: parts(onHost) });
    const state = !node.alive ? "dead" : node.problem ? "silent" : "up";
    return { id: node.id, name: node.name, class: node.class, ip: node.ip, state, problem: node.problem, cpus: node.cpus, cards,
      others: here.filter((each) => each.silent || each.state !== "running").map((each) => `${each.model}: ${each.state}`) };
  }).sort((a, b) => order[a.state] - order[b.state] || a.name.localeCompare(b.name, "en", { numeric: true }));
  return { models, nodes, replicas };
}

function parts(replicas) {
  return replicas.map(({ model, colour, planned_bytes, used_bytes, busy }) => ({ model, colour, planned: planned_bytes, used: used_bytes, busy }));
}

function showNode(node) {
  const words = { up: ["good", "up"], silent: ["warn", "silent"], dead: ["bad", "lost"] }[node.state];
  return h("li", { class: node.state === "up" ? "node" : "node lost" },
    h("header", {}, h("h3", {}, node.name), h("span", { class: `state ${words[0]}` }, words[1])),
    h("div", { class: "quiet small" }, `${node.class ?? node.ip} · ${node.cpus.free.toFixed(1)} of ${node.cpus.total} CPUs free`),
    node.state === "up" ? null : h("p", { class: "small bad" }, node.problem),
    node.state === "dead" ? null : node.cards.map(showCard),
    node.others.length ? h("ul", {}, node.others.map((each) => h("li", { class: "warn" }, each))) : null);
}

function showCard(card) {
  const planned = card.parts.reduce((sum, part) => sum + part.planned, 0), used = card.parts.reduce((sum, part) => sum + part.used, 0);
  const known = card.free === null ? 0 : Math.max(0, card.total - card.free - used);  // memory that no replica of the map has
  const wide = (bytes) => `${Math.min(100, 100 * bytes / card.total)}%`;
  const bar = h("div", { class: "bar", role: "img", "aria-label": `${gib(planned)} of ${gib(card.total)} GiB planned, ${gib(used)} used by models` });
  for (const part of card.parts) {
    const mark = h("i"), piece = h("div", { class: `part c${part.colour}`, title: `${part.model}: ${gib(part.planned)} GiB planned, ${gib(part.used)} used` }, mark);
    piece.style.width = wide(Math.max(part.planned, part.used));
    mark.style.width = `${Math.min(100, 100 * part.used / Math.max(part.planned, part.used, 1))}%`;
    bar.append(piece);
  }
  if (known > card.total / 100) {
    const other = h("div", { class: "part other", title: `${gib(known)} GiB of other programs` });
    other.style.width = wide(known);
    bar.append(other);
  }
  const free = card.free === null ? "" : `, ${gib(card.free)} free`;
  return h("div", {}, h("div", { class: "small" }, card.name), bar,
    h("div", { class: "quiet small" }, `GiB: ${gib(planned)} planned, ${gib(used)} used${free}, ${gib(card.total)} in all`),
    h("ul", {}, card.parts.map((part) => h("li", {}, h("span", { class: `swatch c${part.colour}` }), `${part.model} ${gib(part.used)} of ${gib(part.planned)} GiB`))));
}

function poolsTable(state) {
  const rows = state.models.flatMap((model) => model.pools.map((pool) => [
    model.id, model.task, pool.node_class, pool.state, count(pool.replicas.length), count(pool.queued_tokens), count(pool.tokens_per_s), share(pool.busy),
  ]));
  if (!rows.length) return h("p", { class: "quiet" }, "This key may use no model.");
  return table("Models and pools", ["Model", "Task", "Node class", "State", "#Replicas", "#Queued tokens", "#Tokens/s at most", "#Busy"], rows, true);
}

function replicasTable(view) {
  if (!view.replicas.length) return h("p", { class: "quiet" }, "No replica reports.");
  return table("Replicas", ["Replica", "Model", "Node", "State", "#Queued tokens", "#Busy", "#Planned GiB", "#Used GiB", "#KV pages"],
    view.replicas.map((each) => [each.id || "this process", each.model, each.nodeName, each.state, count(each.queued_tokens), each.silent ? "" : share(each.busy),
      each.silent ? "" : gib(each.planned_bytes), each.silent ? "" : gib(each.used_bytes), count(each.pages_held)]), true);
}

const share = (part) => `${Math.round(100 * part)} %`;

function showFigures(list, state, rates) {
  const now = rates.figures(), pools = state.models.flatMap((model) => model.pools);
  const computed = pools.reduce((sum, pool) => sum + pool.tokens_per_s * pool.busy, 0), queued = pools.reduce((sum, pool) => sum + pool.queued_tokens, 0);
  rates.history.at(-1).computed = computed;
  rates.history.at(-1).queued = queued;
  const past = (name) => rates.history.map((each) => each[name] ?? 0);
  const figures = [
    ["Requests/s", brief(now.requests), `${now.inFlight} in flight`, past("requests")],
    ["Computed tokens/s", brief(computed), "busy share x measured rate", past("computed")],
    ["Latency", seconds(now.p50), `median; 95 %: ${seconds(now.p95)}`, past("p50")],
    ["Queued tokens", brief(queued), `95 % begin within ${seconds(now.queueP95)}`, past("queued")],
    ["Refused/s", brief(now.refused), "answered 429", past("refused")],
    ["Failed/s", brief(now.failed), "answered 424 or 5xx", past("failed")],
    ["Running streams", count(now.streams), `${brief(now.generated)} tokens/s`, past("streams")],
    ["First token", seconds(now.firstP95), "95 % of the answers", past("firstP95")],
  ];
  fill(list, figures, ([name]) => name, ([name, value, more, values]) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, h("small", {}, more)), spark(values)));
}

function spark(values) {
  const most = Math.max(...values, 1e-9), step = 100 / Math.max(1, values.length - 1);
  const points = values.map((value, i) => `${(i * step).toFixed(1)},${(27 - 26 * value / most).toFixed(1)}`).join(" ");
  return h("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" }, h("polyline", { points }));
}
