// Answers the questions of the views from the data inside a page that was written with --out.

const FLOAT = (value) => (value === undefined ? null : Number(value));

function within(value, from, to) {
  return (FLOAT(from) === null || value >= FLOAT(from)) && (FLOAT(to) === null || value <= FLOAT(to));
}

function matches(row, query) {
  const text = (query.text || "").toLowerCase();
  return (query.update === undefined || row.update === FLOAT(query.update)) &&
    (query.ordinal === undefined || row.ordinal === FLOAT(query.ordinal)) &&
    within(row.reward, query.reward_from, query.reward_to) && within(row.tokens, query.tokens_from, query.tokens_to) &&
    (query.version === undefined || (row.version <= FLOAT(query.version) && row.last_version >= FLOAT(query.version))) &&
    (query.cut === undefined || row.cut === FLOAT(query.cut)) && (query.flat === undefined || row.flat === FLOAT(query.flat)) &&
    (query.status === undefined || row.status === ["trained", "left out", "dropped"][query.status]) &&
    (query.problem === undefined || row.problem === query.problem) &&
    (!text || `${row.prompt}\n${row.text}`.toLowerCase().includes(text));
}

function rolloutsOf(run, query) {
  const column = { reward: "reward", tokens: "tokens" }[query.sort] || "ordinal";
  const way = query.way === "up" ? 1 : -1;
  const found = run.rollouts.rows.filter((row) => matches(row, query)).sort((a, b) => way * (a[column] - b[column]) || a.sample - b.sample);
  const offset = Number(query.offset || 0);
  return { ...run.rollouts, rows: found.slice(offset, offset + Number(query.limit || 50)), total: found.length, max_counted: Infinity, offset };
}

function bars(rows, column) {
  const values = rows.map((row) => row[column]);
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  if (distinct.length <= 24) return distinct.map((value) => [value, value, values.filter((v) => v === value).length]);
  const low = distinct[0];
  const width = (distinct.at(-1) - low) / 24;
  const counts = new Array(24).fill(0);
  for (const value of values) counts[Math.min(23, Math.floor((value - low) / width))] += 1;
  return counts.map((n, at) => [low + at * width, low + (at + 1) * width, n]);
}

function seriesOf(run, query) {
  const all = run.series;
  const first = Number(query.first || 0);
  const last = Number(query.last || all.num_updates);
  const inside = all.updates.map((update, at) => [update, at]).filter(([update]) => update >= first && update < last).map(([, at]) => at);
  const take = (values) => inside.map((at) => values[at]);
  const series = {};
  for (const name of query.names.split(",")) {
    const found = all.series[name];
    if (found) series[name] = { mean: take(found.mean), low: take(found.low), high: take(found.high), smooth: take(found.smooth) };
  }
  return { ...all, updates: take(all.updates), first, last: Math.min(last, all.num_updates), series };
}

function timelineOf(run, query) {
  const all = run.timeline;
  const from = Number(query.from || 0);
  const to = Number(query.to || 0) > from ? Number(query.to) : all.to_s;
  const inside = (at) => at >= from && at <= to;
  const lanes = all.lanes.map((lane) => {
    if (lane.spans) return { ...lane, spans: lane.spans.filter(([, , a, b]) => b > from && a < to) };
    const bin = (t) => Math.round(((t - all.from_s) / (all.to_s - all.from_s)) * all.bins);
    const shares = Object.fromEntries(Object.entries(lane.shares).map(([kind, values]) => [kind, values.slice(bin(from), Math.max(bin(from) + 1, bin(to)))]));
    return { ...lane, shares };
  });
  const bins = Math.max(1, ...lanes.map((lane) => (lane.shares ? lane.shares.work.length : 1)));
  return { ...all, from_s: from, to_s: to, bins, lanes, marks: all.marks.filter((mark) => inside(mark.at_s)), updates: all.updates.filter(([, at]) => inside(at)) };
}

function groupsOf(run, query) {
  const chosen = run.groups.groups.filter((group) => (!query.state || group.steps.at(-1).kind === query.state) && (query.around === undefined || group.ordinal <= Number(query.around)));
  const offset = Number(query.offset || 0);
  return { total: chosen.length, offset, groups: chosen.slice(offset, offset + Number(query.limit || 50)) };
}

function kept(found, what) {
  if (found === undefined) throw new Error(`${what} is not in this page, which holds a sample only; open the run folder with llamarl view`);
  return found;
}

export function fromFile(stored, path, query) {
  const parts = path.split("/");
  if (path === "live") return stored.live;
  if (parts[0] === "compare") return parts[1] === "curves" ? kept(stored.compare.curves[query.metric || "reward"], `the metric ${query.metric}`) : stored.compare[parts[1]];
  const run = stored.runs[Number(parts[1])];
  if (parts[2] === "series") return seriesOf(run, query);
  if (parts[2] === "timeline") return timelineOf(run, query);
  if (parts[2] === "rollouts") return rolloutsOf(run, query);
  if (parts[2] === "histograms") {
    const rows = run.rollouts.rows.filter((row) => matches(row, query));
    return { reward: bars(rows, "reward"), tokens: bars(rows, "tokens") };
  }
  if (parts[2] === "groups") return groupsOf(run, query);
  if (parts[2] === "group") return kept(run.group[query.ordinal], `group ${query.ordinal}`);
  if (parts[2] === "rollout") {
    const found = kept(run.rollout[`${query.ordinal}.${query.sample}`], `answer ${query.sample} of group ${query.ordinal}`);
    return query.start ? { ...found, tokens: found.tokens.slice(Number(query.start)) } : found;
  }
  return kept(run[parts[2]], parts[2]);
}
