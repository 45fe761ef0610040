// The table of rollouts, with filters, histograms and search; and one group side by side.
import { get } from "./api.js";
import { cutText, el, facts, fill, hideTip, said, showTip, table } from "./dom.js";
import { count, percent, reward, short } from "./format.js";
import { lifeOf } from "./audit.js";
import { goTo, linkTo, parseRoute, setParams } from "./route.js";

const ROLLOUT_PAGE = 50;
const STATUS_TONE = { trained: "good", "left out": "", dropped: "bad" };
const NUMBERS = [["update", "update"], ["version", "weight version"], ["reward_from", "reward from"], ["reward_to", "to"], ["tokens_from", "tokens from"], ["tokens_to", "to"]];

export async function showRollouts(root, context) {
  const run = context.run;
  const params = () => parseRoute().params;
  const head = el("div", { class: "head" }, el("h1", {}, "Rollouts"));
  const filters = el("form", { class: "card filters", onsubmit: (event) => event.preventDefault() });
  const bars = el("div", { class: "grid two section" });
  const result = el("section", { class: "card section" });
  fill(root, head, filters, bars, result);
  let at = -1;
  let rows = [];
  let round = 0;

  function change(name, value) {
    setParams({ [name]: value, offset: "" });
    refresh();
  }

  function buildFilters() {
    const now = params();
    const number = ([name, label]) => el("label", {}, label, el("input", { type: "number", step: "any", name, value: now[name] || "", onchange: (event) => change(name, event.target.value) }));
    const select = (name, label, options) => el("label", {}, label, el("select", { name, onchange: (event) => change(name, event.target.value) }, options.map(([value, text]) => el("option", { value, selected: (now[name] || "") === value }, text))));
    fill(filters, NUMBERS.map(number),
      context.tasks.length > 1 ? select("task", "task", [["", "all"], ...context.tasks.map((name, n) => [String(n), name])]) : null,
      select("status", "status", [["", "all"], ["0", "trained"], ["1", "left out"], ["2", "dropped"]]),
      select("cut", "end", [["", "all"], ["0", "by itself"], ["1", "cut off"]]),
      select("flat", "group's rewards", [["", "all"], ["0", "differ"], ["1", "all equal"]]),
      el("label", {}, "search in text", el("input", { type: "search", name: "text", placeholder: "prompt or answer ...", value: now.text || "", onchange: (event) => change("text", event.target.value) })),
      el("button", { type: "button", onclick: () => goTo(linkTo(run, "rollouts", { reset: String(++round) })) }, "clear"));
  }

  function histogram(title, data, from, to, digits) {
    const most = Math.max(1, ...data.map((bar) => bar[2]));
    return el("section", { class: "card" }, el("h3", {}, title), data.length ? [
      el("div", { class: "bars" }, data.map(([a, b, n]) => el("button", {
        type: "button", "aria-label": `${title} ${digits(a)} to ${digits(b)}: ${n}`, style: { height: `${n ? Math.max(3, (100 * n) / most) : 0}%` },
        onclick: () => { setParams({ [from]: a, [to]: b, offset: "" }); buildFilters(); refresh(); },
        onpointermove: (event) => showTip(event, `${a === b ? digits(a) : `${digits(a)} to ${digits(b)}`}: ${count(n)} rollouts`), onpointerleave: hideTip,
      }))),
      el("div", { class: "ends num" }, el("span", {}, digits(data[0][0])), el("span", {}, digits(data.at(-1)[1])))] : el("div", { class: "faint" }, "none"));
  }

  async function refresh() {
    const { reset, ...query } = params();
    const offset = Number(query.offset || 0);
    const [found, shape] = await Promise.all([get(`run/${run}/rollouts`, { ...query, limit: ROLLOUT_PAGE }), get(`run/${run}/histograms`, query)]);
    fill(bars, histogram("Rewards", shape.reward, "reward_from", "reward_to", reward), histogram("Tokens of an answer", shape.tokens, "tokens_from", "tokens_to", short));
    rows = found.rows;
    at = Math.min(at, rows.length - 1);
    draw(found, offset, query);
  }

  function draw(found, offset, query) {
    const sorter = (name) => () => { setParams({ sort: name, way: query.sort === name && query.way !== "up" ? "up" : "", offset: "" }); refresh(); };
    const arrow = (name) => ((query.sort || "ordinal") === name ? (query.way === "up" ? " ↑" : " ↓") : "");
    const columns = [
      { name: "update", n: true, show: (r) => (r.update === null ? "-" : el("a", { href: linkTo(run, "rollouts", { update: r.update }), onclick: (event) => event.stopPropagation() }, count(r.update))) },
      { name: `group${arrow("ordinal")}`, n: true, sort: sorter("ordinal"), show: (r) => el("a", { href: linkTo(run, "group", {}, r.ordinal), onclick: (event) => event.stopPropagation() }, `${r.ordinal}.${r.sample}`) },
      context.tasks.length > 1 ? { name: "task", show: (r) => r.task } : null,
      { name: "prompt", show: (r) => el("div", { class: "clip mono", dir: "auto" }, said(r.prompt || "")) },
      { name: "answer", show: (r) => el("div", { class: "clip mono", dir: "auto" }, said(r.text || "")) },
      { name: `reward${arrow("reward")}`, n: true, sort: sorter("reward"), show: (r) => reward(r.reward) },
      { name: `tokens${arrow("tokens")}`, n: true, sort: sorter("tokens"), show: (r) => count(r.tokens) },
      { name: "version", n: true, show: (r) => (r.version === r.last_version ? r.version : `${r.version}-${r.last_version}`) },
      { name: "status", show: (r) => [el("span", { class: `badge ${STATUS_TONE[r.status]}` }, r.status), r.cut ? [" ", el("span", { class: "badge fair" }, "cut off")] : "", r.turns > 1 ? ` ${r.turns} turns` : ""] },
    ].filter(Boolean);
    const searching = found.total === undefined;
    const total = searching ? `${found.rows.length} found, ${count(found.searched)} groups searched` : `${count(found.total)}${found.total >= found.max_counted ? " or more" : ""} rollouts`;
    fill(result,
      found.notes.map((note) => el("div", { class: "note" }, note)),
      found.indexed < 1 ? el("div", { class: "note" }, `${percent(found.indexed)} of the store is indexed so far; the table fills as it goes`) : null,
      rows.length ? table(columns, rows, (row, number) => ({ class: `go ${number === at ? "at" : ""}`, onclick: () => open(row) })) : el("div", { class: "empty" }, found.groups ? "No rollout matches." : "No rollouts are kept in this run folder: observe.rollouts_mb was 0, no update is made yet, or the run is of an earlier release."),
      el("div", { class: "pager" }, total,
        searching ? el("button", { disabled: found.next_before === null, onclick: () => { setParams({ before: found.next_before }); refresh(); } }, "search on, further back") : [
          el("button", { disabled: !offset, onclick: () => turn(-ROLLOUT_PAGE) }, "newer"),
          el("button", { disabled: offset + rows.length >= found.total, onclick: () => turn(ROLLOUT_PAGE) }, "older"),
          offset ? `from ${count(offset + 1)}` : ""]));
  }

  function turn(by) {
    setParams({ offset: Math.max(0, Number(params().offset || 0) + by) });
    refresh();
  }

  function open(row) {
    goTo(linkTo(run, "rollout", {}, row.ordinal, row.sample));
  }

  function key(name) {
    if (name === "j" || name === "k") {
      at = Math.max(0, Math.min(rows.length - 1, at + (name === "j" ? 1 : -1)));
      const found = result.querySelectorAll("tbody tr");
      found.forEach((node, number) => node.classList.toggle("at", number === at));
      found[at]?.scrollIntoView({ block: "nearest" });
    } else if (name === "Enter" && rows[at]) open(rows[at]);
    else if (name === "n") turn(ROLLOUT_PAGE);
    else if (name === "p") turn(-ROLLOUT_PAGE);
    else if (name === "/") filters.querySelector("[name=text]").focus();
    else return false;
    return true;
  }

  buildFilters();
  await refresh();
  return { refresh, key, leave: hideTip };
}

export async function showGroup(root, context) {
  const run = context.run;
  const ordinal = Number(parseRoute().rest[0]);
  const found = await get(`run/${run}/group`, { ordinal });
  const by = parseRoute().params.by || "sample";
  const answers = [...found.rollouts].sort((a, b) => (by === "reward" ? b.reward - a.reward : a.sample - b.sample));
  const scored = found.rollouts.filter((one) => one.reward !== null);
  const mean = scored.reduce((sum, one) => sum + one.reward, 0) / Math.max(1, scored.length);
  fill(root,
    el("div", { class: "head" }, el("h1", {}, `Group ${ordinal}`),
      el("span", { class: "soft num" }, found.update === null ? "" : el("a", { href: linkTo(run, "rollouts", { update: found.update }) }, `update ${found.update}`), ` · mean reward ${reward(mean)}`, scored.length && new Set(scored.map((one) => one.reward)).size === 1 ? " · no variance" : ""),
      el("span", { class: "right" }, el("button", { onclick: () => step(-1) }, "[ earlier"), el("button", { onclick: () => step(1) }, "later ]"), el("button", { onclick: () => { goTo(linkTo(run, "group", { by: by === "reward" ? "sample" : "reward" }, ordinal)); } }, by === "reward" ? "in order" : "best first"))),
    found.dropped ? el("div", { class: "note bad" }, `dropped: ${found.dropped}`) : null,
    el("div", { class: "grid side" },
      el("section", { class: "card" }, el("h2", {}, "Problem"), found.turns.length ? found.turns.map((turn) => [el("div", { class: "soft" }, turn.role), cutText(turn.content, "low")]) : cutText(found.prompt, "low")),
      el("section", { class: "card" }, facts([["expected", cutText(found.answer, "low")], ["scored by", Object.entries(found.scorer).map(([name, weight]) => `${name}${weight === 1 ? "" : ` x ${weight}`}`).join(", ")], ["prompt", `${found.prompt_tokens} tokens`], ["temperature", found.sampling.temperature], ["elsewhere", el("a", { href: linkTo(run, "rollouts", { problem: found.problem_id }) }, "the same problem")]]))),
    found.life ? el("section", { class: "card section" }, el("h3", {}, "Life in the ledger"), lifeOf(found.life)) : el("div", { class: "note" }, "The ledger has folded this group into totals, so its life is not listed any more."),
    el("div", { class: "answers section" }, answers.map((one) => el("section", { class: "card" },
      el("div", { class: "line" }, el("a", { href: linkTo(run, "rollout", {}, ordinal, one.sample) }, `answer ${one.sample}`), el("span", { class: `badge ${one.reward > mean ? "good" : one.reward < mean ? "bad" : ""}` }, `reward ${reward(one.reward)}`), el("span", { class: "soft num" }, `advantage ${short(one.advantage)} · ${one.tokens} tokens`), one.cut ? el("span", { class: "badge fair" }, "cut off") : "", one.status === "trained" ? "" : el("span", { class: "badge", title: one.reason }, one.status)),
      cutText(one.text, "low"), judgedOf(one.judged)))));

  async function step(by) {
    goTo(linkTo(run, "group", parseRoute().params, Math.max(0, ordinal + by)));
  }
  return { refresh() {}, key(name) { if (name === "[") step(-1); else if (name === "]") step(1); else return false; return true; }, leave: hideTip };
}

export function judgedOf(judged) {
  if (judged.note) return el("div", { class: "faint" }, judged.note);
  const parts = judged.parts.map((part) => [`${part.scorer}${part.weight === 1 ? "" : ` x ${part.weight}`}`, part.value === null ? el("span", { class: "faint" }, "not recorded") : reward(part.value)]);
  const pairs = [...parts];
  if (judged.extracted !== undefined) pairs.push(["read as", el("span", { class: "mono", dir: "auto" }, judged.extracted === null ? el("span", { class: "faint" }, "no answer found") : said(judged.extracted))], ["expected", el("span", { class: "mono", dir: "auto" }, said(judged.expected))], ["rule", el("span", { class: "faint" }, judged.rule)]);
  return el("div", {}, facts(pairs));
}
