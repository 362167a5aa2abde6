// The usage of the API key. The key of the settings sees the usage of all keys.

import { json, tell } from "./api.js";
import { count, h, table } from "./dom.js";

export function usage(main) {
  const place = h("div"), heard = new Map();  // by process: its latest answer
  main.append(h("section", { "aria-labelledby": "t-usage" }, h("h2", { id: "t-usage" }, "Usage by key"), place));
  let timer, closed = false;

  async function look() {
    try {
      const answer = await json("console/usage");
      heard.set(answer.process, answer);
      if (!closed) place.replaceChildren(...show(answer, [...heard.values()]));
      tell("");
    } catch (error) {
      tell(error.message);
    }
    if (!closed) timer = setTimeout(look, 5000);
  }
  look();
  return { close: () => { closed = true; clearTimeout(timer); } };
}

function show(answer, processes) {
  if (answer.key === null) return [h("p", {}, "This server needs no API keys, so it counts no usage by key.")];
  const sums = new Map();
  for (const { key, model, requests, tokens, refusals } of processes.flatMap((each) => each.usage)) {
    const sum = sums.get(`${key} ${model}`) ?? [key, model || "(before the body was read)", 0, 0, 0];
    sums.set(`${key} ${model}`, [sum[0], sum[1], sum[2] + requests, sum[3] + tokens, sum[4] + refusals]);
  }
  const began = new Date(1000 * Math.min(...processes.map((each) => each.began_at))).toLocaleString();
  const rows = [...sums.values()].sort((a, b) => b[3] - a[3]).map(([key, model, ...numbers]) => [key, model, ...numbers.map(count)]);
  const limits = Object.entries(answer.limits).filter(([, value]) => value !== null && value.length !== 0).map(([name, value]) => `${name.replaceAll("_", " ")}: ${value}`);
  return [
    h("p", {}, `You are ${answer.key}. Limits: ${limits.join("; ") || "none"}.`),
    rows.length ? table("Usage by key", ["Key", "Model", "#Requests", "#Tokens", "#Refusals"], rows) : h("p", { class: "quiet" }, "No usage yet."),
    h("p", { class: "quiet small" }, `Counted since ${began} by ${processes.length === 1 ? "the process" : `the ${processes.length} processes`} that answered this page. The command emberforge keys usage reads the log of all processes.`),
  ];
}
