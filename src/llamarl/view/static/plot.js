// Plots of series over updates, by uPlot.
import { css, el } from "./dom.js";
import { short } from "./format.js";

const MARKS = {
  death: ["--red", "executor died"],
  restart: ["--red", "executor started again"],
  start: ["--purple", "job started again"],
  setting: ["--purple", "setting changed"],
  join: ["--green", "executor joined"],
  leave: ["--orange", "executor left"],
  snapshot: ["--faint", "snapshot"],
  evaluation: ["--blue", "evaluation"],
};
const QUIET = ["snapshot", "evaluation"];

export const COLORS = ["--blue", "--orange", "--green", "--purple", "--red", "--yellow"];

export function markColor(kind) {
  return css((MARKS[kind] || ["--faint"])[0]);
}

function drawMarks(u, marks) {
  const ctx = u.ctx;
  ctx.save();
  for (const mark of marks) {
    const x = u.valToPos(mark.update, "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    const quiet = QUIET.includes(mark.kind);
    ctx.strokeStyle = markColor(mark.kind);
    ctx.globalAlpha = quiet ? 0.7 : 0.8;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash(quiet ? [] : [4, 3]);
    ctx.beginPath();
    ctx.moveTo(x, quiet ? u.bbox.top + u.bbox.height - (mark.kind === "snapshot" ? 9 : 5) * devicePixelRatio : u.bbox.top);
    ctx.lineTo(x, u.bbox.top + u.bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

// lines: [{label, color, values, low?, high?, dots?, width?}], all over the same x.
export function makePlot(host, options) {
  const { height = 150, marks = [], onclick, onzoom, format = short, range, sync = "updates", xFormat } = options;
  let plot = null;
  let lines = [];
  let onCursor = options.oncursor || (() => {});
  const width = () => Math.max(120, host.clientWidth);

  function series() {
    const found = [{}];
    const bands = [];
    for (const line of lines) {
      const color = css(line.color);
      if (line.low) {
        found.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
        bands.push({ series: [found.length - 2, found.length - 1], fill: line.fill || css("--band") });
      }
      found.push({ stroke: color, width: line.width || 1.7, alpha: line.alpha || 1, spanGaps: true, dash: line.dash, points: { show: Boolean(line.dots) || line.values.filter((v) => v !== null).length < 3, size: 6, fill: color, stroke: color }, label: line.label });
    }
    return { found, bands };
  }

  function columns(xs) {
    const found = [xs];
    for (const line of lines) {
      if (line.low) found.push(line.high, line.low);
      found.push(line.values);
    }
    return found;
  }

  function build(xs) {
    const { found, bands } = series();
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    plot = new uPlot({
      width: width(), height, series: found, bands, legend: { show: false },
      padding: [8, 14, 0, 0],
      scales: { x: { time: false }, y: { range: range || ((u, low, high) => uPlot.rangeNum(low, high === low ? low + 1 : high, 0.08, true)) } },
      axes: [{ ...axis, size: 24, values: (u, vals) => vals.map(xFormat || short) }, { ...axis, size: 46, values: (u, vals) => vals.map(format) }],
      cursor: { sync: { key: sync }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      hooks: {
        draw: [(u) => drawMarks(u, marks)],
        setCursor: [(u) => onCursor(u.cursor.idx)],
        setSelect: [(u) => {
          if (u.select.width > 4 && onzoom) onzoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    }, columns(xs), host);
    let downAt = null;
    plot.over.addEventListener("mousedown", (event) => { downAt = event.clientX; });
    plot.over.addEventListener("click", (event) => {
      if (onclick && downAt !== null && Math.abs(event.clientX - downAt) < 4 && plot.cursor.idx !== null && plot.cursor.idx !== undefined) onclick(plot.data[0][plot.cursor.idx]);
    });
    plot.over.addEventListener("dblclick", () => onzoom && onzoom(null, null));
  }

  function set(xs, newLines, newMarks) {
    const same = plot && lines.length === newLines.length;
    lines = newLines;
    if (newMarks) { marks.length = 0; marks.push(...newMarks); }
    if (same) plot.setData(columns(xs));
    else {
      if (plot) plot.destroy();
      build(xs);
    }
  }

  const watch = new ResizeObserver(() => plot && plot.setSize({ width: width(), height }));
  watch.observe(host);
  return { set, destroy() { watch.disconnect(); if (plot) plot.destroy(); }, hear(f) { onCursor = f; }, get lines() { return lines; } };
}

export function keyOf(color, text) {
  return el("span", { class: "key" }, el("i", { style: { background: css(color) } }), text);
}

export function markLegend(kinds) {
  return kinds.filter((kind) => MARKS[kind]).map((kind) => keyOf(MARKS[kind][0], MARKS[kind][1]));
}
