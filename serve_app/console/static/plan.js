// Where the models of a models.yaml would go on the nodes of this server, before anything is deployed.

import { json } from "./api.js";
import { count, field, gib, h, table } from "./dom.js";

const MOST_ROWS = 1000;
const EXAMPLE = "models:\n  - name: embed\n    model: BAAI/bge-m3\n    min_replicas: 2\n  - name: chat\n    model: Qwen/Qwen3-0.6B\n";

export function plan(main) {
  const file = h("textarea", { rows: 18, class: "code", spellcheck: "false", value: EXAMPLE });
  const error = h("p", { class: "error", role: "alert" }), result = h("div", { "aria-live": "polite" });
  const button = h("button", { type: "submit", class: "primary" }, "Plan");
  let control = null;

  async function submit(event) {
    event.preventDefault();
    if (control) return;
    control = new AbortController();
    button.disabled = true;
    error.textContent = "";
    result.replaceChildren(h("p", { class: "quiet", role: "status" }, "Planning. This takes some seconds."));
    try {
      result.replaceChildren(...shown(await json("console/plan", { body: { models: file.value }, signal: control.signal })));
    } catch (problem) {
      result.replaceChildren();
      error.textContent = problem.name === "AbortError" ? "" : problem.message;
      showLine(file, problem.message);
    }
    [button.disabled, control] = [false, null];
  }

  main.append(h("section", { "aria-label": "Plan" }, h("h2", {}, "Plan"), h("div", { class: "two" },
    h("form", { class: "panel", onsubmit: submit }, field("models.yaml", file), h("div", { class: "buttons" }, button), error,
      h("p", { class: "quiet small" }, "The plan deploys nothing. It uses whole cards, as if nothing ran on them.")), result)));
  return { close: () => control?.abort() };
}

// Selects the line that an error names.
function showLine(file, message) {
  const number = Number(/line (\d+)/.exec(message)?.[1] ?? 0), lines = file.value.split("\n");
  if (number < 1 || number > lines.length) return;
  const start = lines.slice(0, number - 1).reduce((sum, line) => sum + line.length + 1, 0);
  file.focus();
  file.setSelectionRange(start, start + lines[number - 1].length);
}

export function shown(plan) {
  const place = (each) => each.card === null ? `${each.node}: CPUs` : `${each.node}: card ${each.card}`;
  const rows = (items, row) => items.slice(0, MOST_ROWS).map(row);
  const cut = plan.replicas.length > MOST_ROWS || plan.cards.length > MOST_ROWS;
  return [
    plan.summary.map((line, index) => h("p", { class: index ? "small" : plan.complete ? "good" : "bad" }, line)),
    plan.unplaced.length === 0 ? [] : h("div", { class: "panel" }, h("h3", {}, "Does not fit"), h("ul", {}, plan.unplaced.map((each) => h("li", {},
      `${each.model}${each.count ? ` lacks ${each.count} of its replicas` : " has no card to wake on"}: ${each.why}`,
      each.ways_out.length ? h("ul", {}, each.ways_out.map((way) => h("li", {}, `way out: ${way}`))) : null)))),
    h("h3", {}, "Replicas"), table("Replicas of the plan", ["Model", "Place", "#Needs GiB", "#Of GiB", "#Tokens/s", "", "Why"], rows(plan.replicas, (each) =>
      [each.model, place(each), gib(each.needs_bytes), gib(each.capacity), count(each.tokens_per_s), each.required ? "required" : "room to grow", each.why])),
    h("h3", {}, "Cards"), table("Cards of the plan", ["Place", "Class", "#Used GiB", "#Of GiB", "#Full", "Models"], rows(plan.cards, (each) =>
      [place(each), each.node_class, gib(each.used_bytes), gib(each.capacity), `${Math.round(100 * each.used_bytes / each.capacity)} %`, each.models.join(", ")])),
    cut ? h("p", { class: "small" }, `The tables end after ${MOST_ROWS} rows.`) : [],
    h("details", {}, h("summary", {}, "Notes"), h("ul", {}, plan.notes.map((note) => h("li", {}, note)))),
  ].flat();
}
