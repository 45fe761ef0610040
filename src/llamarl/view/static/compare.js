// Several runs side by side.
import { get } from "./api.js";
import { css, el, fill, said, table } from "./dom.js";
import { count, reward, short } from "./format.js";
import { COLORS, keyOf, makePlot } from "./plot.js";
import { linkTo, parseRoute, setParams } from "./route.js";

const AXES = { update: "updates", tokens: "tokens", minutes: "minutes" };

export async function showCompare(root, context) {
  const controls = el("span", { class: "right" });
  const host = el("div");
  const heldOut = el("div");
  const legend = el("div", { class: "legend soft", style: { display: "flex", gap: "16px", marginTop: "8px" } });
  const title = el("h2");
  const below = el("div");
  fill(root, el("div", { class: "head" }, el("h1", {}, "Compare"), controls), el("div", { class: "grid two" }, el("section", { class: "card" }, title, host), el("section", { class: "card" }, el("h2", {}, "Held-out"), heldOut)), legend, below);
  const plots = [makePlot(host, { height: 280, sync: "compare" }), makePlot(heldOut, { height: 280, sync: "compare-held-out" })];
  const metrics = (await get("run/0/overview")).metrics;

  async function refresh() {
    const { metric = "reward", axis = "update" } = parseRoute().params;
    fill(controls,
      el("select", { "aria-label": "metric", onchange: (event) => { setParams({ metric: event.target.value }); refresh(); } }, metrics.map((name) => el("option", { selected: name === metric }, name))),
      el("span", { class: "soft" }, "over"),
      el("div", { class: "choice" }, Object.entries(AXES).map(([key, name]) => el("button", { "aria-pressed": String(key === axis), onclick: () => { setParams({ axis: key }); refresh(); } }, name))));
    title.textContent = `${metric} over ${AXES[axis]}`;
    const [data, totals] = await Promise.all([get("compare/curves", { metric }), get("compare/settings")]);
    draw(data, axis);
    drawBelow(totals);
  }

  function draw(data, axis) {
    const joined = together(data.runs.map((run) => [run.axes[axis], run.smooth]));
    plots[0].set(joined.xs, joined.columns.map((values, n) => ({ label: data.runs[n].name, color: COLORS[n % COLORS.length], values })));
    const atVersion = (run, version) => (version <= 0 || axis === "update" ? version : run.axes[axis][Math.min(run.axes[axis].length - 1, Math.round((version / Math.max(1, run.axes.update.at(-1) + 1)) * run.axes[axis].length) - 1)] ?? null);
    const scored = together(data.runs.map((run) => [run.evaluations.map((e) => atVersion(run, e.version)), run.evaluations.map((e) => e.value)]));
    plots[1].set(scored.xs, scored.columns.map((values, n) => ({ label: data.runs[n].name, color: COLORS[n % COLORS.length], values, dots: true })));
    fill(legend, data.runs.map((run, n) => keyOf(COLORS[n % COLORS.length], run.name)));
  }

  // One x for all: uPlot draws several lines over the same axis, with gaps that are bridged.
  function together(pairs) {
    const xs = [...new Set(pairs.flatMap(([x]) => x.filter((v) => v !== null)))].sort((a, b) => a - b);
    const place = new Map(xs.map((x, n) => [x, n]));
    const columns = pairs.map(([x, values]) => {
      const found = new Array(xs.length).fill(null);
      x.forEach((v, n) => { if (v !== null) found[place.get(v)] = values[n]; });
      return found;
    });
    return { xs, columns };
  }

  function drawBelow({ runs, settings }) {
    const problems = el("section", { class: "card section" }, el("h2", {}, "The same problem, answered by all"));
    fill(below,
      el("section", { class: "card section" }, el("h2", {}, "Runs"), table([
        { name: "run", show: (r) => [el("span", { class: "key" }, el("i", { style: { background: css(COLORS[runs.indexOf(r) % COLORS.length]) } }), el("a", { href: linkTo(runs.indexOf(r), "overview") }, r.name))] },
        { name: "state", show: (r) => r.state },
        { name: "updates", n: true, show: (r) => count(r.updates) },
        { name: "minutes", n: true, show: (r) => short(r.minutes) },
        { name: "tokens", n: true, show: (r) => count(r.tokens) },
        { name: "reward, first tenth", n: true, show: (r) => reward(r.reward_first) },
        { name: "last tenth", n: true, show: (r) => reward(r.reward_last) },
        { name: "held-out, first", n: true, show: (r) => reward(r.eval_first) },
        { name: "last", n: true, show: (r) => reward(r.eval_last) },
      ], runs)),
      runs.length < 2 ? el("div", { class: "note" }, "One run is open. Name several: llamarl view RUN RUN ...") : [
        el("section", { class: "card section" }, el("h2", {}, "Settings that differ"), settings.length ? table([{ name: "setting", show: (s) => el("span", { class: "mono" }, s.setting) }, ...runs.map((run, n) => ({ name: run.name, show: (s) => el("span", { class: "mono" }, JSON.stringify(s.values[n])) }))], settings) : el("div", { class: "soft" }, "None: the settings are the same.")),
        problems]);
    if (runs.length > 1) drawProblems(problems, runs);
  }

  async function drawProblems(card, runs) {
    const found = await get("compare/problems");
    card.append(found.length ? table([{ name: "problem", show: (p) => el("div", { class: "clip mono", dir: "auto" }, said(p.prompt)) }, ...runs.map((run, n) => ({ name: run.name, n: true, show: (p) => [el("a", { href: linkTo(n, "group", {}, p.answers[n].ordinal) }, `mean reward ${reward(p.answers[n].reward)}`), el("span", { class: "faint" }, ` update ${p.answers[n].update ?? "-"}`)] }))], found) : el("div", { class: "soft" }, "None among the rollouts that are kept."));
  }

  await refresh();
  return { refresh, leave() { plots.forEach((plot) => plot.destroy()); } };
}
