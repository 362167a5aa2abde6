// The last request as a command, or as a program. The key's place is a variable.

import { url, hasKey } from "./api.js";

export function curl(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl ${quoted(url(path))}`, "-H 'Content-Type: application/json'"];
  if (hasKey()) lines.push('-H "Authorization: Bearer $EMBERFORGE_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body, null, 1))}`);
  return lines.join(" \\\n  ");
}

export function python(path, body) {
  const headers = hasKey() ? '\n    headers={"Authorization": f"Bearer {os.environ[\'EMBERFORGE_API_KEY\']}"},' : "";
  return `${hasKey() ? "import os\n\n" : ""}import requests\n\nresponse = requests.post(\n    ${JSON.stringify(url(path))},` +
    `${headers}\n    json=${literal(body, "    ")},\n)\nresponse.raise_for_status()\nprint(response.json())\n`;
}

// A value of JSON in Python's notation.
function literal(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((each) => inner + literal(each, inner))
    : Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${literal(each, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length ? `${open}\n${items.join(",\n")},\n${indent}${close}` : open + close;
}

const dialog = document.getElementById("code-dialog"), area = document.getElementById("code-field");
document.getElementById("code-close").addEventListener("click", () => dialog.close());

// Shows the code, and copies it where the browser allows that (HTTPS and localhost).
export async function show(title, code) {
  document.getElementById("code-title").textContent = title;
  const said = document.getElementById("code-text");
  said.textContent = "";
  area.value = code;
  dialog.showModal();
  area.select();
  try {
    await navigator.clipboard.writeText(code);
    said.textContent = "Copied to the clipboard.";
  } catch {
    said.textContent = "The text is selected: copy it with Ctrl-C.";
  }
}
