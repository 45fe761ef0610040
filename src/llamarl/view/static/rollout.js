// One answer, token by token, colored by what is known of each token.
import { get } from "./api.js";
import { cutText, css, el, facts, fill, hideTip, said, showTip } from "./dom.js";
import { count, percent, reward, short } from "./format.js";
import { judgedOf } from "./rollouts.js";
import { goTo, linkTo, parseRoute, setParams } from "./route.js";

const VERSION_COLORS = ["--blue", "--orange", "--green", "--purple", "--yellow", "--red"];
const MODES = {
  probability: {
    name: "probability",
    amount: (token) => 1 - Math.exp(token.lp),
    ramp: [["certain", 0], ["unlikely", 1]],
    color: (part) => mix("--orange", 0.85 * part),
  },
  gap: {
    name: "difference to the trainer",
    needs: "has_policy",
    missing: "The trainer's log-probs are not recorded for this answer: it was not trained on, or the run is of an earlier release. Over whole updates the difference is the metric logprob_gap.",
    amount: (token) => Math.max(-1, Math.min(1, token.pl - token.lp)),
    ramp: [["trainer: less likely", -1], ["the same", 0], ["more likely", 1]],
    color: (part) => (part < 0 ? mix("--red", 0.8 * -part) : mix("--blue", 0.8 * part)),
  },
  version: { name: "weight version", amount: (token) => token.v, color: (v) => mix(VERSION_COLORS[v % VERSION_COLORS.length], 0.32) },
  advantage: {
    name: "advantage",
    amount: (token) => Math.max(-1, Math.min(1, token.a)),
    ramp: [["worse than the group", -1], ["0", 0], ["better", 1]],
    color: (part) => (part < 0 ? mix("--red", 0.7 * -part) : mix("--green", 0.7 * part)),
  },
  plain: { name: "none", amount: () => 0, color: () => "transparent" },
};

function mix(name, part) {
  return `color-mix(in srgb, ${css(name)} ${(100 * part).toFixed(0)}%, transparent)`;
}

export async function showRollout(root, context) {
  const run = context.run;
  const [ordinal, sample] = parseRoute().rest.map(Number);
  const found = await get(`run/${run}/rollout`, { ordinal, sample });
  const tokens = [...found.tokens];
  const text = el("pre", { class: "said tall", dir: "auto" });
  const scale = el("div", { class: "scale" });
  const modes = el("div", { class: "choice", role: "group", "aria-label": "color of tokens" });
  const more = el("div", { class: "pager" });
  const mode = () => (MODES[parseRoute().params.color] ? parseRoute().params.color : "probability");

  function tell(token, at) {
    const lines = [`token ${at}: id ${token.id}`];
    if (token.given) lines.push("given: written by a tool, not trained on");
    else {
      lines.push(`probability ${percent(Math.exp(token.lp), 1)} (log ${short(token.lp)})`, `sampled by version ${token.v}`);
      if (token.pl !== undefined) lines.push(`trainer: log ${short(token.pl)}, difference ${short(token.pl - token.lp)}`);
      if (token.a !== null) lines.push(`advantage ${short(token.a)}`);
    }
    return lines.join("\n");
  }

  function paint() {
    const name = mode();
    const chosen = MODES[name];
    const possible = !chosen.needs || found[chosen.needs];
    fill(modes, Object.entries(MODES).map(([key, one]) => el("button", { type: "button", "aria-pressed": String(key === name), onclick: () => { setParams({ color: key }); paint(); } }, one.name)));
    text.childNodes.forEach((node) => {
      const token = tokens[node.dataset?.at];
      if (token) node.style.background = token.given || !possible ? "" : chosen.color(chosen.amount(token));
    });
    fill(scale, !possible ? chosen.missing : name === "version" ? versionsKey() : chosen.ramp ? rampKey(chosen) : "", found.brief.turns > 1 ? el("span", { class: "faint" }, "dimmed: written by a tool") : "");
  }

  function rampKey(chosen) {
    const low = chosen.ramp[0][1];
    const steps = Array.from({ length: 16 }, (_, n) => low + ((1 - low) * n) / 15);
    return [chosen.ramp[0][0], el("span", { class: "ramp" }, steps.map((part) => el("i", { style: { background: chosen.color(part) } }))), chosen.ramp.at(-1)[0]];
  }

  function versionsKey() {
    const seen = [...new Set(tokens.filter((token) => !token.given).map((token) => token.v))];
    return seen.map((v) => el("span", { class: "key" }, el("i", { style: { background: MODES.version.color(v), height: "10px" } }), `version ${v}`));
  }

  function write(from) {
    tokens.slice(from).forEach((token, n) => {
      const at = from + n;
      text.append(el("span", { class: token.given ? "tok given" : "tok" }, said(token.t)));
      text.lastChild.dataset.at = at;
    });
    const end = found.start + tokens.length;
    fill(more, end < found.all_tokens ? [`${count(end)} of ${count(found.all_tokens)} tokens`, el("button", { onclick: readOn }, "read on")] : "");
    paint();
  }

  async function readOn() {
    const next = await get(`run/${run}/rollout`, { ordinal, sample, start: tokens.length });
    const from = tokens.length;
    tokens.push(...next.tokens);
    write(from);
  }

  text.addEventListener("pointermove", (event) => {
    const at = event.target.closest?.(".tok")?.dataset.at;
    if (at === undefined) hideTip(); else showTip(event, tell(tokens[at], at));
  });
  text.addEventListener("pointerleave", hideTip);

  const brief = found.brief;
  const turn = (by) => goTo(linkTo(run, "rollout", parseRoute().params, ordinal, Math.max(0, sample + by)));
  fill(root,
    el("div", { class: "head" }, el("h1", {}, `Answer ${sample} of group ${ordinal}`), el("a", { href: linkTo(run, "group", {}, ordinal) }, "the whole group"), found.update === null ? "" : el("a", { href: linkTo(run, "rollouts", { update: found.update }) }, `update ${found.update}`),
      el("span", { class: "right" }, el("button", { disabled: !sample, onclick: () => turn(-1) }, "[ previous"), el("button", { onclick: () => turn(1) }, "next ]"))),
    found.notes.map((note) => el("div", { class: "note" }, note)),
    el("div", { class: "grid side" },
      el("div", {},
        el("section", { class: "card" }, el("h3", {}, "Prompt"), cutText(found.prompt, "low")),
        el("section", { class: "card section" }, el("div", { class: "head", style: { marginBottom: "0" } }, el("h3", {}, "Answer"), el("span", { class: "right" }, el("span", { class: "soft" }, "color by"), modes)), scale, text, more)),
      el("div", {},
        el("section", { class: "card" }, el("div", { class: "soft" }, "Reward"), el("div", { class: "big" }, reward(brief.reward)), facts([["advantage", found.advantage_by_token ? "by token" : short(brief.advantage)], ["tokens", `${count(brief.tokens)} sampled of ${count(found.all_tokens)}`], ["status", brief.reason ? `${brief.status}: ${brief.reason}` : brief.status], ["end", brief.cut ? "cut off at the limit" : "by itself"], ["turns", brief.turns], ["versions", brief.versions.map(([v, n]) => `${v} (${n} tokens)`).join(", ")]])),
        el("section", { class: "card section" }, el("h3", {}, "Why this reward"), judgedOf(brief.judged), el("div", { class: "faint", style: { marginTop: "8px", fontSize: "12px" } }, "Rewards are as recorded. What was read in the answer is found again by the scorer's own rule.")))));
  write(0);
  return { refresh() {}, key(name) {
    const names = Object.keys(MODES);
    if (name === "[" && sample) turn(-1);
    else if (name === "]") turn(1);
    else if (name === "c") { setParams({ color: names[(names.indexOf(mode()) + 1) % names.length] }); paint(); }
    else if (name === "u") goTo(linkTo(run, "group", {}, ordinal));
    else return false;
    return true;
  }, leave: hideTip };
}
