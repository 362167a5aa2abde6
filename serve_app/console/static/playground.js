// The common parts of the playground's views.

import { curl, python, show } from "./code.js";
import { h } from "./dom.js";

// A choice among the models that can do the task.
export function modelChoice(live, able) {
  const names = live.state.models.filter(able).map((model) => model.id);
  return h("select", { id: "f-model" }, names.map((name) => h("option", { value: name }, name)));
}

export function noModel(main, title, what) {
  main.append(h("section", {}, h("h2", {}, title), h("p", {}, `No model that this server shows ${what}.`)));
}

// A view with a form on the left and the result on the right. `request` gives [path, body]; `run` shows the result.
export function workbench(main, title, fields, request, run) {
  const result = h("div", { "aria-live": "polite" }), error = h("p", { class: "error", role: "alert" });
  const button = h("button", { type: "submit", class: "primary" }, "Run"), stop = h("button", { type: "button", disabled: true, onclick: () => control?.abort() }, "Stop");
  const copy = (name, make) => h("button", { type: "button", onclick: () => safely(() => show(name, make(...request()))) }, name);
  let control = null;

  async function safely(work) {
    error.textContent = "";
    try {
      await work();
    } catch (problem) {
      error.textContent = problem.name === "AbortError" ? "Stopped." : problem.message;
    }
  }

  async function submit(event) {
    event.preventDefault();
    if (control) return;
    control = new AbortController();
    [button.disabled, stop.disabled] = [true, false];
    result.setAttribute("aria-busy", "true");
    await safely(() => run(result, control.signal));
    result.setAttribute("aria-busy", "false");
    [button.disabled, stop.disabled, control] = [false, true, null];
  }

  main.append(h("section", { "aria-label": title }, h("h2", {}, title), h("div", { class: "two" },
    h("form", { class: "panel", onsubmit: submit }, fields, h("div", { class: "buttons" }, button, stop, copy("Copy as curl", curl), copy("Copy as Python", python)), error), result)));
  return { close: () => control?.abort() };
}

export const linesOf = (area) => area.value.split("\n").map((line) => line.trim()).filter(Boolean);
