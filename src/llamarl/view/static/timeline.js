// A lane for each executor: what it worked on and when it waited; the simulator's prediction below.
import { get } from "./api.js";
import { css, el, fill, hideTip, showTip, table } from "./dom.js";
import { percent, seconds, short } from "./format.js";
import { keyOf, markColor } from "./plot.js";
import { goTo, linkTo, parseRoute, setParams } from "./route.js";

const KIND = { work: "--blue", weights: "--orange", save: "--purple" };
const LANE = 30;
const GAP = 8;
const AXIS = 22;

export async function showTimeline(root, context) {
  const run = context.run;
  const head = el("div", { class: "head" });
  const body = el("div");
  fill(root, head, body);
  const measured = lanesCanvas({ onzoom, onclick: (update) => goTo(linkTo(run, "rollouts", { update })) });
  const predicted = lanesCanvas({});
  const side = el("section", { class: "card" });
  const lower = el("section", { class: "card section lanes" });
  const legend = el("div", { class: "legend soft", style: { display: "flex", gap: "16px", flexWrap: "wrap", marginTop: "10px" } });
  fill(body, el("section", { class: "card lanes" }, measured.node, legend), lower, el("div", { class: "section" }, side));
  let data = null;

  function onzoom(from, to) {
    setParams(from === null ? { from: "", to: "" } : { from: from.toFixed(3), to: to.toFixed(3) });
    refresh();
  }

  async function refresh() {
    const { start, from, to } = parseRoute().params;
    data = await get(`run/${run}/timeline`, { start, from, to, bins: 600 });
    const many = data.starts.length > 1;
    fill(head, el("h1", {}, "Timeline"), el("span", { class: "soft num" }, data.lanes.length ? `${seconds(data.to_s - data.from_s)} from ${seconds(data.from_s)}` : ""),
      el("span", { class: "right" },
        many ? el("select", { "aria-label": "start of the job", onchange: (event) => { setParams({ start: event.target.value, from: "", to: "" }); refresh(); } }, data.starts.map((n) => el("option", { value: n, selected: n === data.start }, `start ${n + 1}`))) : null,
        [["10 s", 10], ["1 min", 60], ["10 min", 600]].map(([name, length]) => el("button", { disabled: data.end_s < length, onclick: () => onzoom(Math.max(0, data.end_s - length), data.end_s) }, `last ${name}`)),
        el("button", { onclick: () => onzoom(null, null) }, "all")));
    if (data.missing) return fill(body, el("div", { class: "note" }, data.missing));
    measured.draw(data, data.from_s, data.to_s, data.lanes.some((lane) => lane.executor.includes(" rank ")) ? {} : data.ranks);
    fill(legend, keyOf("--blue", "work"), keyOf("--orange", "weights change"), keyOf("--purple", "snapshot"), keyOf("--wait", "waiting"), keyOf("--red", "death"), el("span", { class: "faint" }, "drag to zoom · double click for all · click for the rollouts of that update"));
    prediction().catch((error) => fill(lower, el("div", { class: "note bad" }, String(error.message || error))));
  }

  async function prediction() {
    if (!lower.firstChild) fill(lower, el("h2", {}, "Predicted"), el("div", { class: "faint" }, "simulating ..."));
    const found = await get(`run/${run}/predicted`, { from: data.from_s, to: data.to_s, bins: 600 });
    if (found.missing) {
      fill(lower, el("h2", {}, "Predicted"), el("div", { class: "soft" }, found.missing));
    } else {
      fill(lower, el("h2", {}, "Predicted by the simulator"), predicted.node, el("div", { class: "faint", style: { marginTop: "6px" } }, `${found.updates} simulated updates on ${found.machine}; answers ${found.answers}, prompts of ${found.prompt_tokens} tokens, ${percent(found.skipped)} of tokens skipped; no evaluations or snapshots`));
      predicted.draw({ lanes: found.lanes, marks: [], updates: [] }, found.from_s, found.to_s, data.ranks);
    }
    const roles = [...new Set([...Object.keys(data.measured.waiting), ...Object.keys(found.waiting || {})])];
    const rows = [{ name: "seconds an update", was: data.measured.update_s, said: found.update_s, show: seconds }, ...roles.map((role) => ({ name: `${role} waits`, was: data.measured.waiting[role], said: (found.waiting || {})[role], show: percent }))];
    fill(side, el("h2", {}, "Measured and predicted"), table([
      { name: "", show: (r) => r.name },
      { name: "measured", n: true, show: (r) => r.show(r.was) },
      { name: "predicted", n: true, show: (r) => (r.said === undefined ? "-" : r.show(r.said)) },
      { name: "predicted / measured", n: true, show: (r) => (r.said === undefined || !r.was || r.show === percent ? "" : `${short(r.said / r.was)}x`) },
    ], rows));
  }

  await refresh();
  return { refresh, leave() { measured.leave(); predicted.leave(); hideTip(); } };
}

function lanesCanvas({ onzoom, onclick }) {
  const canvas = el("canvas", { role: "img", "aria-label": "timeline of the executors" });
  const names = el("div");
  const node = el("div", { class: "split" }, names, canvas);
  let shown = null;
  let drag = null;

  const xOf = (t) => ((t - shown.from) / (shown.to - shown.from)) * canvas.clientWidth;
  const tOf = (x) => shown.from + (x / canvas.clientWidth) * (shown.to - shown.from);

  function paint() {
    if (!shown) return;
    const { lanes, marks, updates } = shown.data;
    const height = AXIS + lanes.length * (LANE + GAP);
    canvas.style.height = `${height}px`;
    canvas.width = canvas.clientWidth * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    const ctx = canvas.getContext("2d");
    ctx.scale(devicePixelRatio, devicePixelRatio);
    const width = canvas.clientWidth;
    lanes.forEach((lane, at) => {
      const y = at * (LANE + GAP);
      ctx.fillStyle = css("--wait");
      ctx.fillRect(0, y, width, LANE);
      if (lane.spans) for (const [kind, color] of Object.entries(KIND)) { // short ones, such as weight changes, on top
        ctx.fillStyle = css(color);
        for (const [of, , a, b] of lane.spans) if (of === kind) ctx.fillRect(xOf(a), y, Math.max(kind === "work" ? 0.6 : 2, xOf(b) - xOf(a)), LANE);
      }
      else {
        const step = width / shown.data.bins;
        for (let bin = 0; bin < lane.shares.work.length; bin++) {
          let from = y + LANE;
          for (const kind of ["work", "weights", "save"]) {
            const part = Math.min(1, lane.shares[kind][bin]) * LANE;
            if (part <= 0) continue;
            ctx.fillStyle = css(KIND[kind]);
            ctx.fillRect(bin * step, from - part, step + 0.5, part);
            from -= part;
          }
        }
      }
    });
    const bottom = lanes.length * (LANE + GAP);
    ctx.fillStyle = css("--faint");
    for (const [, at] of updates) ctx.fillRect(xOf(at), bottom - GAP + 2, 1, 4);
    for (const mark of marks) {
      ctx.strokeStyle = ctx.fillStyle = markColor(mark.kind);
      const x = xOf(mark.at_s);
      const lane = lanes.findIndex((one) => one.executor === mark.executor);
      if (mark.kind === "death" && lane >= 0) {
        const y = lane * (LANE + GAP) + LANE / 2;
        ctx.lineWidth = 2.5;
        ctx.beginPath();
        ctx.moveTo(x - 6, y - 6); ctx.lineTo(x + 6, y + 6); ctx.moveTo(x + 6, y - 6); ctx.lineTo(x - 6, y + 6);
        ctx.stroke();
      } else ctx.fillRect(x, lane >= 0 ? lane * (LANE + GAP) : 0, 1.5, lane >= 0 ? LANE : bottom);
    }
    axis(ctx, width, bottom);
    if (drag && drag.to !== null) {
      ctx.fillStyle = css("--band");
      ctx.fillRect(Math.min(drag.from, drag.to), 0, Math.abs(drag.to - drag.from), bottom);
    }
  }

  function axis(ctx, width, y) {
    const length = shown.to - shown.from;
    const rough = length / Math.max(2, width / 110);
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
    ctx.fillStyle = css("--soft");
    ctx.font = "11px system-ui, sans-serif";
    for (let t = Math.ceil(shown.from / step) * step; t <= shown.to; t += step) {
      ctx.fillRect(xOf(t), y, 1, 4);
      ctx.fillText(step >= 60 ? seconds(t) : `${Number(t.toFixed(4))} s`, xOf(t) + 3, y + 14);
    }
  }

  function told(event) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const lane = shown.data.lanes[Math.floor(y / (LANE + GAP))];
    if (!lane) return "";
    const t = tOf(x);
    const mark = shown.data.marks.find((one) => Math.abs(xOf(one.at_s) - x) < 7 && (!one.executor || one.executor === lane.executor));
    if (mark) return `${mark.text}\nat ${seconds(mark.at_s)}`;
    if (lane.spans) {
      const span = lane.spans.find(([, , a, b]) => a <= t && t <= b);
      return span ? `${lane.executor}: ${span[1]} (${span[0]})\n${seconds(span[3] - span[2])}, from ${seconds(span[2])}` : `${lane.executor} waits\nat ${seconds(t)}`;
    }
    const bin = Math.min(shown.data.bins - 1, Math.floor((x / canvas.clientWidth) * shown.data.bins));
    return `${lane.executor} about ${seconds(t)}: busy ${percent(["work", "weights", "save"].reduce((sum, kind) => sum + lane.shares[kind][bin], 0))}`;
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!shown) return;
    if (drag) {
      drag.to = event.clientX - canvas.getBoundingClientRect().left;
      paint();
    }
    const text = told(event);
    if (text) showTip(event, text); else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("pointerdown", (event) => {
    if (onzoom) drag = { from: event.clientX - canvas.getBoundingClientRect().left, to: null };
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!drag || !shown) return;
    const { from } = drag;
    drag = null;
    const to = event.clientX - canvas.getBoundingClientRect().left;
    if (Math.abs(to - from) > 5) onzoom(tOf(Math.min(from, to)), tOf(Math.max(from, to)));
    else {
      const next = shown.data.updates.find(([, at]) => at >= tOf(to));
      if (next && onclick && event.detail < 2) onclick(next[0]);
    }
  });
  canvas.addEventListener("dblclick", () => onzoom && onzoom(null, null));
  const watch = new ResizeObserver(paint);
  watch.observe(canvas);

  function draw(data, from, to, ranks) {
    shown = { data, from, to: Math.max(to, from + 1e-6) };
    fill(names, data.lanes.map((lane) => {
      const count = (ranks || {})[lane.executor.split("/")[0]] || 1;
      return el("div", { style: { height: `${LANE + GAP}px`, lineHeight: "1.25", fontSize: "12.5px" }, title: count > 1 ? `${count} ranks that work in step; the spans are those of the first one` : "" }, lane.executor, count > 1 ? el("span", { class: "faint" }, ` x${count}`) : "", el("div", { class: "faint num", style: { fontSize: "11.5px" } }, `waits ${percent(Math.max(0, 1 - lane.busy))}`));
    }));
    paint();
  }

  return { node, draw, leave: () => watch.disconnect() };
}
