// What became of every group, from the ledger.
import { get } from "./api.js";
import { css, el, facts, fill, table } from "./dom.js";
import { count, percent, short } from "./format.js";
import { linkTo, parseRoute, setParams } from "./route.js";

const AUDIT_PAGE = 50;

export async function showAudit(root, context) {
  const run = context.run;
  const top = el("div");
  const groups = el("section", { class: "card section" });
  fill(root, el("div", { class: "head" }, el("h1", {}, "Audit"), el("span", { class: "soft" }, "every group was trained exactly once, or dropped with a reason")), top, groups);

  async function refresh() {
    const found = await get(`run/${run}/audit`);
    drawTop(found);
    await drawGroups(found);
  }

  function drawTop(found) {
    const problems = found.counted_twice.length + found.never_issued.length;
    const dropped = Object.values(found.dropped).reduce((sum, n) => sum + n, 0);
    const [tone, verdict] = problems ? ["bad", "not clean"] : found.clean ? ["good", "clean"] : found.only_unfinished ? ["fair", "clean so far"] : ["bad", "not clean"];
    const total = Math.max(1, found.num_groups);
    const part = (n, color) => el("i", { style: { width: `${(100 * n) / total}%`, background: css(color) } });
    fill(top,
      found.damage ? el("div", { class: "note bad" }, found.damage) : null,
      el("div", { class: "grid" },
        el("section", { class: `card answer ${tone}` }, el("div", { class: "soft" }, "Is every group accounted for?"), el("div", { class: "verdict" }, verdict), el("ul", {}, el("li", {}, found.closed ? `closed: ${found.closed}` : "not closed: the job is running, or was killed"), found.digest ? el("li", { class: "mono" }, `digest ${found.digest}`) : "")),
        el("section", { class: "card" }, el("div", { class: "soft" }, "Groups"), el("div", { class: "big" }, count(found.num_groups)), el("div", { class: "flow" }, part(found.trained, "--green"), part(dropped, "--red")), el("div", { class: "soft num" }, `${count(found.trained)} trained · ${count(dropped)} dropped · ${count(found.num_unfinished)} not yet`)),
        el("section", { class: "card" }, facts([["updates", count(found.updates)], ["tokens sampled", count(found.tokens)], ["staleness", `at most ${found.max_staleness}`], ["rewinds", count(found.rewinds)], ["counted twice", found.counted_twice.length ? found.counted_twice.join(", ") : "none"], ["never issued", found.never_issued.length ? found.never_issued.join(", ") : "none"], ["folded", found.folded_groups ? `${count(found.folded_groups)} groups of the first ${count(found.folded_updates)} updates, in totals only` : "none: every group is listed"]]))),
      el("div", { class: "grid two section" },
        el("section", { class: "card" }, el("h2", {}, "Why groups were dropped"), dropped ? table([{ name: "reason", show: (r) => r[0] }, { name: "groups", n: true, show: (r) => count(r[1]) }, { name: "share", n: true, show: (r) => percent(r[1] / total, 2) }], Object.entries(found.dropped).sort((a, b) => b[1] - a[1])) : el("div", { class: "soft" }, "None was dropped.")),
        el("section", { class: "card" }, el("h2", {}, "Rewinds"), found.rewind_list.length ? table([{ name: "who", show: (r) => r.executor }, { name: "back to update", n: true, show: (r) => count(r.to_update) }], found.rewind_list) : el("div", { class: "soft" }, found.rewinds ? `${count(found.rewinds)}, all folded into totals.` : "None: no update was made twice."))));
  }

  async function drawGroups(audited) {
    const { state = "", offset = 0, around = "" } = parseRoute().params;
    const found = await get(`run/${run}/groups`, { state, offset, around, limit: AUDIT_PAGE });
    const at = Number(offset);
    const go = (changes) => { setParams(changes); drawGroups(audited); };
    fill(groups,
      el("div", { class: "head" }, el("h2", {}, "Lives"),
        el("select", { "aria-label": "state", onchange: (event) => go({ state: event.target.value, offset: "" }) }, [["", "all states"], ...Object.entries(audited.states).map(([name, n]) => [name, `${name} (${count(n)})`])].map(([value, text]) => el("option", { value, selected: value === state }, text))),
        el("label", { class: "soft" }, "from group ", el("input", { type: "number", value: around, onchange: (event) => go({ around: event.target.value, offset: "" }) }))),
      found.groups.length ? table([
        { name: "group", n: true, show: (g) => el("a", { href: linkTo(run, "group", {}, g.ordinal) }, g.ordinal) },
        { name: "life", show: lifeOf },
      ], found.groups) : el("div", { class: "empty" }, audited.listed ? "No group is in this state." : "All groups are folded into totals."),
      el("div", { class: "pager" }, `${count(found.total)} groups`, el("button", { disabled: !at, onclick: () => go({ offset: Math.max(0, at - AUDIT_PAGE) }) }, "newer"), el("button", { disabled: at + found.groups.length >= found.total, onclick: () => go({ offset: at + AUDIT_PAGE }) }, "older")));
  }

  await refresh();
  return { refresh, leave() {} };
}

export function lifeOf(group) {
  const words = (step) => {
    const d = step.details;
    if (step.kind === "issued") return `issued to ${d[0]} at version ${d[1]}`;
    if (step.kind === "trained") return `trained in update ${d[0]}${step.taken_back ? " (taken back)" : ""}`;
    if (step.kind === "dropped") return `dropped: ${d[0]}`;
    return `${step.kind}: ${count(d[0])} tokens, version${d[1] === d[2] ? ` ${d[1]}` : `s ${d[1]}-${d[2]}`}${step.kind === "generated" ? "" : `, reward ${short(d[3])}`}`;
  };
  return el("div", { class: "life" }, group.steps.map((step, n) => [n ? el("span", { class: "faint" }, "→") : "", el("span", { class: `step ${step.kind} ${step.taken_back ? "back" : ""}` }, words(step))]));
}
