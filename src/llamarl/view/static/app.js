// Starts the page: the bar on top, views by address, live news, keyboard, theme.
import { fileNotes, get, isFile } from "./api.js";
import { el, fill, hideTip } from "./dom.js";
import { count } from "./format.js";
import { showAudit } from "./audit.js";
import { showCompare } from "./compare.js";
import { showOverview } from "./overview.js";
import { showRollout } from "./rollout.js";
import { showGroup, showRollouts } from "./rollouts.js";
import { goTo, linkTo, parseRoute } from "./route.js";
import { showTimeline } from "./timeline.js";

const VIEWS = { overview: showOverview, timeline: showTimeline, rollouts: showRollouts, group: showGroup, rollout: showRollout, compare: showCompare, audit: showAudit };
const TABS = [["overview", "Overview"], ["timeline", "Timeline"], ["rollouts", "Rollouts"], ["compare", "Compare"], ["audit", "Audit"]];
const PARENT = { group: "rollouts", rollout: "rollouts" };
const KEYS = [["1 ... 5", "the five views"], ["j k", "next and previous row"], ["Enter", "open the row"], ["n p", "next and previous page"], ["/", "search in rollouts"], ["[ ]", "previous and next group or answer"], ["c", "next color of tokens"], ["u", "from an answer up to its group"], ["t", "dark or light"], ["?", "this list"]];
const POLL_MS = 2000;
const root = document.getElementById("page");
const bar = document.getElementById("top");
const help = document.getElementById("help");
let runs = [];
let current = null;
let turn = 0;

function theme(chosen) {
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function savedTheme() {
  try { return localStorage.getItem("llamarl-theme"); } catch { return null; }
}

function flipTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("llamarl-theme", next); } catch { /* a page from a file may have no storage */ }
  theme(next);
  show();
}

function drawBar() {
  const route = parseRoute();
  const run = runs[route.run] || runs[0];
  const active = PARENT[route.view] || route.view;
  fill(bar,
    el("a", { class: "brand", href: linkTo(route.run, "overview") }, "LlamaRL"),
    el("div", { class: "run" },
      runs.length > 1 ? el("select", { "aria-label": "run", onchange: (event) => goTo(linkTo(Number(event.target.value), active === "compare" ? "overview" : active)) }, runs.map((one, n) => el("option", { value: n, selected: n === route.run }, one.name))) : el("span", { class: "name", title: run.name }, run.name),
      el("span", { class: `pill ${run.state}`, id: "state" }, run.state === "live" ? `live · ${count(run.updates)} of ${count(run.updates_of)}` : run.state)),
    el("nav", {}, TABS.map(([view, name]) => el("a", { href: linkTo(route.run, view), "aria-current": view === active ? "page" : null }, name))),
    el("div", { class: "tools" }, el("button", { onclick: flipTheme, title: "dark or light (t)", "aria-label": "dark or light" }, "◐"), el("button", { onclick: () => help.showModal(), title: "keys (?)", "aria-label": "keys" }, "?")));
  document.title = `${run.name} · LlamaRL`;
}

async function show() {
  const mine = ++turn;
  if (current && current.leave) current.leave();
  current = null;
  hideTip();
  const route = parseRoute();
  if (!runs[route.run] || !VIEWS[route.view]) return goTo(linkTo(0, "overview"));
  drawBar();
  const place = el("div");
  root.replaceChildren(place);
  if (isFile) root.prepend(el("div", { class: "note", style: { marginBottom: "14px" } }, fileNotes.join(" ")));
  scrollTo(0, 0);
  try {
    const made = await VIEWS[route.view](place, { run: route.run, tasks: runs[route.run].tasks });
    if (mine === turn) current = made; else if (made.leave) made.leave();
  } catch (error) {
    if (mine === turn) fill(place, el("div", { class: "note bad" }, String(error.message || error)));
  }
  if (mine === turn) root.dataset.ready = location.hash || "#/";
}

async function poll() {
  let found = null;
  try {
    found = await get("live");
  } catch {
    const pill = document.getElementById("state");
    if (pill) { pill.className = "pill"; pill.textContent = "the server is gone"; }
    return;
  }
  const route = parseRoute();
  const changed = found.some((run, n) => runs[n] && run.stamp !== runs[n].stamp && (n === route.run || route.view === "compare"));
  runs = found;
  if (changed) {
    drawBar();
    if (current && current.refresh) await Promise.resolve(current.refresh()).catch(() => {});
  }
}

function follow() {
  const again = () => setTimeout(async () => {
    if (!document.hidden) await poll();
    again();
  }, runs.some((run) => run.state === "live" || run.indexed < 1) ? POLL_MS : 5 * POLL_MS);
  again();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open || event.target.matches("input, select, textarea")) return;
  const number = Number(event.key);
  if (number >= 1 && number <= TABS.length) goTo(linkTo(parseRoute().run, TABS[number - 1][0]));
  else if (event.key === "?") help.showModal();
  else if (event.key === "t") flipTheme();
  else if (!(current && current.key && current.key(event.key))) return;
  event.preventDefault();
});

fill(help, el("h2", {}, "Keys"), el("dl", { class: "facts" }, KEYS.map(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])), el("p", { class: "soft" }, "Drag on a curve or a timeline to zoom, double click for all, click for the rollouts of that update. The address always leads back to what you see."), el("form", { method: "dialog" }, el("button", {}, "close")));
theme(savedTheme());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!savedTheme()) { theme(null); show(); } });
runs = await get("live");
addEventListener("hashchange", show);
if (runs.length > 1 && !location.hash) history.replaceState(null, "", linkTo(0, "compare"));
await show();
if (!isFile) follow();
