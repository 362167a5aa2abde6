// Vectors of texts: similarities as a heat map and a table, and all texts as points of a plane.

import { json } from "./api.js";
import { field, h, table } from "./dom.js";
import { linesOf, modelChoice, noModel, workbench } from "./playground.js";
import { decoded, dot, normalized, plane } from "./vectors.js";

const MOST_IN_HEAT_MAP = 100, MOST_IN_TABLE = 30, MOST_NEIGHBOURS = 10, TEXTS_A_REQUEST = 256;
const EXAMPLE = "A cat sleeps on the sofa.\nThe kitten naps on the couch.\nA dog runs in the park.\nInterest rates rose again.\nThe central bank tightened its policy.\nBread needs flour, water and yeast.";

export function embed(main, live) {
  const model = modelChoice(live, (each) => each.embeds);
  if (!model.options.length) return noModel(main, "Embed", "gives vectors");
  const texts = h("textarea", { rows: 14, value: EXAMPLE });
  const request = (input = linesOf(texts)) => ["v1/embeddings", { model: model.value, input }];
  return workbench(main, "Embed", [field("Model", model), field("Texts, one per line", texts)], request, async (result, signal) => {
    const input = linesOf(texts);
    if (!input.length) throw new Error("Enter a text.");
    const progress = h("p", { role: "status" });
    result.replaceChildren(progress);
    let width = 0, data = null;
    const size = Math.min(TEXTS_A_REQUEST, live.state.max_client_batch_size);
    for (let start = 0; start < input.length; start += size) {
      progress.textContent = `${start} of ${input.length} texts`;
      const [path, body] = request(input.slice(start, start + size));
      const { data: rows } = await json(path, { body: { ...body, encoding_format: "base64" }, signal });
      const vectors = rows.map((row) => decoded(row.embedding));
      width = vectors[0].length;
      data ??= new Float32Array(width * input.length);
      vectors.forEach((vector, i) => data.set(vector, (start + i) * width));
    }
    progress.textContent = "Computing the map.";
    data = normalized(data, width);
    const points = await plane(data, width);
    result.replaceChildren(...shown(input, data, width, points));
  });
}

function shown(texts, data, width, points) {
  const few = texts.slice(0, MOST_IN_HEAT_MAP), readout = h("p", { class: "readout quiet" }, "Point at a cell or a dot.");
  const say = (text) => { readout.textContent = text; };
  const similar = few.map((_, a) => few.map((_, b) => dot(data, width, a, b)));
  const choice = h("select", { id: "f-near" }, texts.slice(0, 1000).map((text, index) => h("option", { value: String(index) }, `${index + 1}. ${text.slice(0, 80)}`)));
  const near = h("div");
  const showNear = () => near.replaceChildren(nearest(texts, data, width, Number(choice.value)));
  choice.addEventListener("change", showNear);
  showNear();
  const cut = texts.length > few.length ? ` of the first ${few.length} texts` : "";
  return [
    h("p", {}, `${texts.length} texts, ${width} numbers each.`),
    h("div", { class: "charts" },
      h("figure", { class: "panel" }, h("figcaption", {}, h("h3", {}, `Similarities${cut}`)), heatMap(few, similar, say), h("p", { class: "quiet small" }, "The stronger the colour, the more alike.")),
      h("figure", { class: "panel" }, h("figcaption", {}, h("h3", {}, "Map")), dots(texts, points, say), h("p", { class: "quiet small" }, "The two principal components of the vectors."))),
    readout,
    h("div", { class: "panel" }, h("h3", {}, "Nearest texts"), field("Text", choice), near),
    h("details", {}, h("summary", {}, "Similarities as a table"),
      table("Cosine similarities", ["", ...few.slice(0, MOST_IN_TABLE).map((_, i) => `#${i + 1}`)],
        few.slice(0, MOST_IN_TABLE).map((text, a) => [`${a + 1}. ${text.slice(0, 40)}`, ...similar[a].slice(0, MOST_IN_TABLE).map((each) => each.toFixed(2))]))),
  ];
}

function nearest(texts, data, width, chosen) {
  const found = texts.map((_, index) => [dot(data, width, chosen, index), index]).filter(([, index]) => index !== chosen).sort((a, b) => b[0] - a[0]).slice(0, MOST_NEIGHBOURS);
  return table("Nearest texts", ["#Similarity", "Text"], found.map(([score, index]) => [score.toFixed(3), texts[index]]));
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function heatMap(texts, similar, say) {
  const cell = Math.max(4, Math.floor(560 / texts.length)), side = cell * texts.length;
  const canvas = h("canvas", { width: side, height: side, role: "img", "aria-label": "Heat map of the similarities. The table below has the values." });
  const pen = canvas.getContext("2d"), all = similar.flat(), low = Math.min(...all), span = Math.max(1e-6, 1 - low);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  similar.forEach((row, y) => row.forEach((value, x) => {
    const share = (value - low) / span;
    pen.fillStyle = dark ? `hsl(24 ${40 + 50 * share}% ${16 + 50 * share}%)` : `hsl(20 ${60 + 25 * share}% ${96 - 58 * share}%)`;
    pen.fillRect(x * cell, y * cell, cell, cell);
  }));
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(canvas, event).map((each) => Math.floor(each / cell));
    if (similar[y]?.[x] !== undefined) say(`${similar[y][x].toFixed(3)}: ${y + 1}. ${texts[y]} | ${x + 1}. ${texts[x]}`);
  });
  return canvas;
}

function dots(texts, points, say) {
  const side = 560, pad = 24, canvas = h("canvas", { width: side, height: side, role: "img", "aria-label": "Map of the texts. Nearest texts are listed below." });
  const pen = canvas.getContext("2d");
  const scaled = [0, 1].map((axis) => {
    let low = Infinity, high = -Infinity;
    for (const point of points) { low = Math.min(low, point[axis]); high = Math.max(high, point[axis]); }
    return points.map((point) => pad + (side - 2 * pad) * (high > low ? (point[axis] - low) / (high - low) : 0.5));
  });
  pen.fillStyle = style("--accent");
  const radius = points.length > 1000 ? 2 : 5;
  pen.globalAlpha = points.length > 1000 ? 0.5 : 1;
  for (let i = 0; i < points.length; i++) {
    pen.beginPath();
    pen.arc(scaled[0][i], scaled[1][i], radius, 0, 7);
    pen.fill();
  }
  if (points.length <= 40) {
    pen.fillStyle = style("--text");
    pen.font = "15px system-ui, sans-serif";
    points.forEach((_, i) => {
      const text = `${i + 1}. ${texts[i].slice(0, 26)}`, right = scaled[0][i] > side / 2;
      pen.textAlign = right ? "right" : "left";
      pen.fillText(text, scaled[0][i] + (right ? -9 : 9), scaled[1][i] + 5);
    });
  }
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(canvas, event);
    let best = 0, least = Infinity;
    for (let i = 0; i < points.length; i++) {
      const far = (scaled[0][i] - x) ** 2 + (scaled[1][i] - y) ** 2;
      if (far < least) [best, least] = [i, far];
    }
    say(`${best + 1}. ${texts[best]}`);
  });
  return canvas;
}

function place(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) * canvas.width / box.width, (event.clientY - box.top) * canvas.height / box.height];
}
