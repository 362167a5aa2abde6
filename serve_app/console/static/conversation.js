// The requests and the turns of a conversation. This module uses neither the page nor another module, so that node can test it.

// The body of `/v1/chat/completions`. `tools` and `schema` are texts of JSON, or empty. Throws an error for other text.
export function bodyOf({ model, system, history, message, most, temperature, tools, schema }) {
  const messages = [...(system.trim() ? [{ role: "system", content: system }] : []), ...history, { role: "user", content: message }];
  const body = { model, messages, max_tokens: Number(most), temperature: Number(temperature) };
  const given = parsed("tools", tools), shape = parsed("JSON schema", schema);
  if (given) body.tools = given;
  if (shape) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: shape } };
  return body;
}

function parsed(name, text) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The field ${name} is no JSON: ${error.message}`);
  }
}

// Adds what an event of a stream brings to an answer: text, reasoning, and parts of tool calls. Returns whether it brings any.
export function addEvent(answer, event) {
  const { content, reasoning, tool_calls } = event.choices[0]?.delta ?? {};
  answer.text += content ?? "";
  answer.reasoning += reasoning ?? "";
  for (const each of tool_calls ?? []) {
    const call = answer.calls[each.index] ??= { id: each.id, type: "function", function: { name: "", arguments: "" } };
    call.function.name += each.function?.name ?? "";
    call.function.arguments += each.function?.arguments ?? "";
  }
  return Boolean(content || reasoning || tool_calls);
}

// What the next request says of this one. Reasoning is no part of a history. The console runs no tools, and a model expects a
// result for each call.
export function turnsOf(asked, text, calls) {
  const answer = calls.length ? { role: "assistant", content: text || null, tool_calls: calls } : { role: "assistant", content: text };
  return [asked, answer, ...calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "(no result: the console runs no tools)" }))];
}
