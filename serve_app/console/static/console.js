// The views, and the state that they share.

import { json, tell } from "./api.js";
import { chat } from "./chat.js";
import { cluster } from "./cluster.js";
import { h } from "./dom.js";
import { embed } from "./embed.js";
import { plan } from "./plan.js";
import { Rates } from "./rates.js";
import { classify, rerank } from "./scores.js";
import { usage } from "./usage.js";

const EVERY_MS = 2000;
const live = { rates: new Rates(), state: null, paused: false };
const main = document.getElementById("main");
const views = { cluster, embed, rerank, classify, chat, plan, usage };
let shown = null;  // the view's name, and what it gave: a function that takes each state, or an object with `close`
let timer;

function open() {
  const name = location.hash.slice(1) in views ? location.hash.slice(1) : "cluster";
  shown?.view?.close?.();
  shown = { name, view: null };
  main.replaceChildren();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${name} - emberforge console`;
  if (name === "cluster" && !live.state) main.append(h("p", { class: "quiet" }, "Asking the server."));
  else start();
}

// The view begins when there is a state: it names the models.
function start() {
  if (shown.view || (!live.state && shown.name !== "usage")) return;
  main.replaceChildren();
  shown.view = views[shown.name](main, live);
  if (shown.name === "cluster") shown.view(live.state);
}

async function look() {
  clearTimeout(timer);
  if (!document.hidden && !live.paused && (shown.name === "cluster" || !live.state)) {
    try {
      live.state = await json("console/state");
      live.rates.take(live.state);
      if (typeof shown.view === "function") shown.view(live.state);
      else start();
    } catch (error) {
      tell(`${error.message} The figures are old.`);
      if (error.status === 401) main.querySelector("p")?.replaceChildren("The server needs an API key.");
    }
  }
  clearTimeout(timer);
  timer = setTimeout(look, EVERY_MS);
}

addEventListener("hashchange", () => { open(); main.focus(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
open();
look();
