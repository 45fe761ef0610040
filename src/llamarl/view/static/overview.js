// The first view of a run: three answers, advice, and the curves behind them.
import { get, isFile } from "./api.js";
import { el, facts, fill, table } from "./dom.js";
import { count, day, percent, seconds, short } from "./format.js";
import { keyOf, makePlot, markLegend } from "./plot.js";
import { goTo, linkTo, parseRoute, setParams } from "./route.js";

const share = (value) => percent(value, value !== null && Math.abs(value) < 0.1 ? 1 : 0);
const CHARTS = [
  { title: "Reward", names: ["reward"], band: true },
  { title: "Held-out", evaluation: true },
  { title: "Loss on the rows", names: ["sft_loss"], band: true, only: true },
  { title: "KL to the teacher", names: ["teacher_kl"], band: true, only: true },
  { title: "Staleness", names: ["staleness_mean", "staleness_max"], labels: ["mean", "max"] },
  { title: "Clipped and effective samples", names: ["effective_sample_size", "clipped_share"], labels: ["effective samples", "clipped"], format: share },
  { title: "Log-prob gap", names: ["logprob_gap"], hint: "generator against trainer on the same weights, per token" },
  { title: "Groups without variance, answers cut off", names: ["zero_variance_share", "truncated_share"], labels: ["no variance", "cut off"], format: share },
  { title: "Answer length, tokens", names: ["answer_tokens"], band: true },
  { title: "Gradient norm", names: ["grad_norm"], band: true },
  { title: "Tokens a second", names: ["generated_per_s", "trained_per_s"], labels: ["generated", "trained"] },
  { title: "Who waits", waiting: true, format: share },
  { title: "Entropy and KL to behavior", names: ["entropy", "kl_behavior"], labels: ["entropy", "KL"] },
  { title: "Learning rate", names: ["lr"] },
];
const COLOR = ["--blue", "--orange", "--green", "--purple"];

export async function showOverview(root, context) {
  const run = context.run;
  const zoom = () => parseRoute().params;
  const top = el("div");
  const charts = el("div", { class: "grid section" });
  const below = el("div");
  const rangeNote = el("div", { class: "soft" });
  fill(root, top, el("div", { class: "head section" }, el("h2", {}, "Curves"), rangeNote), charts, below);
  const plots = [];
  let first = null;

  function chart(spec) {
    const host = el("div");
    const now = el("span", { class: "now" });
    const legend = el("div", { class: "legend" });
    const missing = el("div", { class: "empty", hidden: true }, "not recorded in this run");
    charts.append(el("section", { class: "card plot", "aria-label": spec.title, title: spec.hint }, el("div", { class: "title" }, el("h3", {}, spec.title), now), host, missing, legend));
    const plot = makePlot(host, {
      format: spec.format || short,
      onclick: (update) => goTo(linkTo(run, "rollouts", { update: Math.max(0, Math.round(update) - (spec.evaluation ? 1 : 0)) })),
      onzoom: (a, b) => { setParams(a === null ? { first: "", last: "" } : { first: Math.max(0, Math.floor(a)), last: Math.ceil(b) + 1 }); refresh(); },
      sync: spec.evaluation ? "evaluations" : "updates",
    });
    return { spec, host, now, legend, missing, plot };
  }

  function names(metrics) {
    const waiting = metrics.filter((name) => name.startsWith("waiting."));
    return { waiting, all: [...new Set([...CHARTS.flatMap((c) => c.names || []), ...waiting])].filter((name) => metrics.includes(name)) };
  }

  function draw(card, data, found) {
    const { spec, plot } = card;
    let lines = [];
    let xs = data.updates;
    if (spec.evaluation) {
      const inside = found.evaluations.filter((e) => e.version >= data.first && e.version <= data.last);
      xs = inside.map((e) => e.version);
      lines = [{ label: found.score_name, color: "--blue", values: inside.map((e) => e.value), low: inside.map((e) => e.low), high: inside.map((e) => e.high), dots: true }];
    } else {
      const wanted = spec.waiting ? names(found.metrics).waiting : spec.names.filter((name) => data.series[name]);
      wanted.forEach((name, at) => {
        const s = data.series[name];
        if (!s || s.mean.every((v) => v === null)) return;
        const label = spec.waiting ? name.replace("waiting.", "") : (spec.labels || [""])[spec.names.indexOf(name)] || "";
        if (spec.band) {
          lines.push({ label: "", color: COLOR[at], values: s.mean, low: s.low, high: s.high, alpha: 0.35, width: 1 });
          lines.push({ label: `mean of ${data.width}`, color: COLOR[at], values: s.smooth, width: 2 });
        } else lines.push({ label, color: COLOR[at], values: s.mean });
      });
    }
    const empty = !xs.length || !lines.length;
    card.host.hidden = empty;
    card.missing.hidden = !empty;
    if (empty) return;
    plot.set(xs, lines, found.marks);
    const format = spec.format || short;
    const last = (values) => values.filter((v) => v !== null).at(-1);
    const tell = (at) => {
      const shown = lines.filter((line) => line.label !== "" || lines.length === 1);
      const value = (line) => format(at === null || at === undefined ? last(line.values) : line.values[at]);
      card.now.textContent = shown.length === 1 ? value(shown[0]) : "";
      fill(card.legend, at === null || at === undefined ? "" : el("span", { class: "faint" }, `${spec.evaluation ? "version" : "update"} ${xs[at]}`), shown.length > 1 ? shown.map((line) => keyOf(line.color, `${line.label} ${value(line)}`)) : el("span", { class: "faint" }, shown[0] && spec.band ? shown[0].label : spec.evaluation && found.evaluations.some((e) => e.low !== e.high) ? "95% interval" : ""));
    };
    plot.hear(tell);
    tell(null);
  }

  async function refresh() {
    const found = await get(`run/${run}/overview`);
    if (!first) {
      first = found;
      for (const spec of CHARTS) if (!spec.only || found.metrics.includes(spec.names[0])) plots.push(chart(spec));
    }
    drawTop(found);
    const { first: from, last: to } = zoom();
    const { all, waiting } = names(found.metrics);
    const ask = (wanted) => get(`run/${run}/series`, { names: wanted.join(","), first: from, last: to, points: 500 });
    const data = await ask(all.filter((name) => !waiting.includes(name)));
    fill(rangeNote, `updates ${data.first} to ${Math.max(data.first, data.last - 1)} of ${data.num_updates}`, data.num_updates > 500 ? ` (bins of ${Math.max(1, Math.ceil((data.last - data.first) / data.updates.length))}; the band is the range inside a bin)` : "", from ? [" ", el("button", { onclick: () => { setParams({ first: "", last: "" }); refresh(); } }, "whole run")] : el("span", { class: "faint" }, " · drag to zoom, click for its rollouts"));
    for (const card of plots) if (!card.spec.waiting) draw(card, data, found);
    drawBelow(found);
    if (waiting.length) ask(waiting).then((waits) => { // these take longer: they are made from all spans
      for (const card of plots) if (card.spec.waiting) draw(card, waits, found);
    }).catch(() => {}); // the server is gone, which the bar on top says
    else for (const card of plots) if (card.spec.waiting) draw(card, data, found);
  }

  function drawTop(found) {
    const progress = found.state === "live" && found.updates ? ` · ${seconds((found.elapsed_s / found.updates) * Math.max(0, found.updates_of - found.updates))} left` : "";
    fill(top,
      el("div", { class: "head" },
        el("h1", {}, found.name),
        el("span", { class: "soft num" }, `update ${count(found.updates)} of ${count(found.updates_of)} · ${seconds(found.elapsed_s)}${progress}`),
        el("span", { class: "right soft" }, found.began_at ? `began ${day(found.began_at)}` : "")),
      found.state === "stopped" || found.state === "killed" ? el("div", { class: "note bad" }, `${found.state}: ${found.outcome}`) : null,
      found.notes.map((note) => el("div", { class: "note" }, note)),
      el("div", { class: "grid section" }, found.answers.map((answer) => el("section", { class: `card answer ${answer.tone}` }, el("div", { class: "soft" }, answer.question), el("div", { class: "verdict" }, answer.verdict), el("ul", {}, answer.facts.map((fact) => el("li", {}, fact)))))),
      el("section", { class: "card section" }, el("h2", {}, "Advice"), found.advice.length ? found.advice.map((one) => el("div", { class: "advice" }, el("div", {}, el("span", { class: `badge ${one.tone}` }, one.tone === "bad" ? "act" : "look"), " ", one.text), el("div", { class: "figure soft num" }, `${one.metric} ${short(one.value)}`), el("div", { class: "mono" }, `${one.setting}: ${one.now}`))) : el("div", { class: "soft" }, found.updates ? "Nothing to say: no sign of trouble in the last updates." : "Nothing to say before the first updates.")));
  }

  function drawBelow(found) {
    const kinds = [...new Set(found.marks.map((mark) => mark.kind))];
    const events = found.marks.filter((mark) => mark.kind !== "evaluation").slice(-40).reverse();
    fill(below, el("div", { class: "legend soft section", style: { display: "flex", gap: "14px" } }, kinds.length ? ["marks: ", markLegend(kinds)] : ""),
      el("div", { class: "grid two section" },
        el("section", { class: "card" }, el("h2", {}, "Job"), facts([...found.facts, ["folder", found.folder], found.summary ? ["tokens", `${count(found.summary.tokens_generated)} generated, ${count(found.summary.tokens_trained)} trained`] : null, found.summary && found.summary.policy ? ["policy", found.summary.policy] : null])),
        el("section", { class: "card" }, el("h2", {}, "What happened"), events.length ? table([{ name: "update", n: true, show: (m) => count(m.update) }, { name: "what", show: (m) => m.text }], events) : el("div", { class: "soft" }, "No restarts, snapshots or changed settings are recorded."))));
  }

  await refresh();
  if (isFile) rangeNote.append(" (a page that was written: zoom shows fewer points)");
  return { refresh, leave() { plots.forEach((card) => card.plot.destroy()); } };
}
