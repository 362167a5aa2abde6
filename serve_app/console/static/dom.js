// Small helpers for elements and figures. Text becomes text nodes, never HTML.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  const element = tag === "svg" || tag === "polyline" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "disabled") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Shows one element for each item. An item that is as before keeps its element, and so its place for a screen reader.
export function fill(list, items, keyOf, render) {
  const known = new Map([...list.children].map((child) => [child.dataset.key, child]));
  list.replaceChildren(...items.map((item) => {
    const key = keyOf(item), text = JSON.stringify(item), old = known.get(key);
    if (old?.dataset.made === text) return old;
    const made = render(item);
    made.dataset.key = key;
    made.dataset.made = text;
    return made;
  }));
}

// A column whose name begins with # has numbers. A `wide` table scrolls where its rows would break.
export function table(caption, columns, rows, wide = false) {
  const numbers = columns.map((column) => column.startsWith("#"));
  const cell = (tag) => (value, index) => h(tag, { class: numbers[index] ? "number" : null, scope: tag === "th" ? "col" : null }, value);
  return h("div", { class: wide ? "scroll wide" : "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map((column) => column.replace(/^#/, "")).map(cell("th")))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell("td")))))));
}

export function field(name, control) {
  control.id ||= `f-${name.toLowerCase().replace(/\W+/g, "-")}`;
  return h("div", {}, h("label", { for: control.id }, name), control);
}

export const gib = (bytes) => (bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 1 : 0);
export const count = (number) => number === null || number === undefined ? "" : Math.round(number).toLocaleString("en");

export function brief(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)} M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(0)} k`;
  return number >= 10 || number === 0 ? number.toFixed(0) : number.toFixed(1);
}

export function seconds(value) {
  if (value === null) return "-";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(1)} s`;
}
