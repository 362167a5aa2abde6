// A conversation, answered token by token, with tools and JSON schemas.

import { events } from "./api.js";
import { addEvent, bodyOf, turnsOf } from "./conversation.js";
import { field, h } from "./dom.js";
import { modelChoice, noModel, workbench } from "./playground.js";

const TOOLS = JSON.stringify([{ type: "function", function: { name: "get_weather", description: "The weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 1);

export function chat(main, live) {
  const model = modelChoice(live, (each) => each.task === "generation");
  if (!model.options.length) return noModel(main, "Chat", "generates text");
  const system = h("textarea", { rows: 2 }), message = h("textarea", { rows: 4, value: "Why is the sky blue?" });
  const most = h("input", { type: "number", min: 1, value: "256" }), temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: "0.7" });
  const tools = h("textarea", { rows: 5, class: "code", placeholder: TOOLS, spellcheck: "false" });
  const schema = h("textarea", { rows: 5, class: "code", placeholder: '{"type": "object", "properties": {"answer": {"type": "string"}}}', spellcheck: "false" });
  let history = [];

  const request = () => ["v1/chat/completions", bodyOf({ model: model.value, system: system.value, history, message: message.value,
    most: most.value, temperature: temperature.value, tools: tools.value, schema: schema.value })];

  const clear = h("button", { type: "button", onclick: () => { history = []; log.replaceChildren(); } }, "New conversation");
  const log = h("div", { role: "log", "aria-label": "Conversation" });
  const fields = [field("Model", model), field("System", system), field("Message", message),
    h("div", { class: "row" }, field("Tokens at most", most), field("Temperature", temperature)),
    h("details", {}, h("summary", {}, "Tools and JSON schema"), field("Tools, as JSON", tools), field("JSON schema of the answer", schema)), clear];

  return workbench(main, "Chat", fields, request, async (result, signal) => {
    const [path, body] = request(), asked = body.messages.at(-1);
    if (log.parentNode !== result) result.replaceChildren(log);
    const text = document.createTextNode(""), thought = document.createTextNode(""), said = h("p", { class: "quiet small" });
    const reply = h("div", { class: "message assistant", "aria-busy": "true" }, h("b", {}, body.model), h("div", { class: "quiet small" }, thought), text);
    log.append(h("div", { class: "message user" }, h("b", {}, "You"), asked.content), reply, said);
    const start = performance.now(), answer = { text: "", reasoning: "", calls: [] };
    let first = null, usage = null;
    try {
      for await (const event of events(path, { body: { ...body, stream: true, stream_options: { include_usage: true } }, signal })) {
        usage = event.usage ?? usage;
        if (addEvent(answer, event)) first ??= performance.now();
        [text.data, thought.data] = [answer.text, answer.reasoning];
      }
    } finally {
      reply.setAttribute("aria-busy", "false");
    }
    for (const call of answer.calls) reply.append(h("pre", { class: "code" }, `${call.function.name}(${call.function.arguments})`));
    history.push(...turnsOf(asked, answer.text, answer.calls));
    const end = performance.now(), tokens = usage?.completion_tokens ?? 0;
    said.textContent = first === null ? "The answer is empty." : `First token after ${Math.round(first - start)} ms, ${tokens} tokens after ${Math.round(end - start)} ms.`;
  });
}
