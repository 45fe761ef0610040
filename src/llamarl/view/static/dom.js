// Makes elements. Text always becomes a text node: nothing here parses markup.

export function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  put(node, children);
  return node;
}

export function put(node, children) {
  for (const child of children.flat(9)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren();
  return put(node, children);
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

// Text of a model as nodes: characters that hide, or turn the direction of text, are shown by name.
export function said(text) {
  const found = [];
  let last = 0;
  for (const match of String(text).matchAll(HIDDEN)) {
    if (match.index > last) found.push(text.slice(last, match.index));
    found.push(el("span", { class: "ctl" }, nameOf(match[0])));
    last = match.index + match[0].length;
  }
  if (last < text.length) found.push(text.slice(last));
  return found;
}

function nameOf(char) {
  const code = char.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
}

// A text that the server may have cut: {text, chars}.
export function cutText(cut, className) {
  const more = cut.chars > cut.text.length ? el("div", { class: "faint" }, `... the first ${cut.text.length.toLocaleString("en")} of ${cut.chars.toLocaleString("en")} characters`) : null;
  return [el("pre", { class: `said ${className || ""}`, dir: "auto" }, said(cut.text)), more];
}

const tipNode = () => document.getElementById("tip");

export function showTip(event, text) {
  const tip = tipNode();
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
  const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}

export function hideTip() {
  tipNode().hidden = true;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function table(columns, rows, rowProps) {
  const head = el("tr", {}, columns.map((c) => el("th", { class: `${c.n ? "n" : ""} ${c.sort ? "sort" : ""}`, onclick: c.sort, title: c.title }, c.name)));
  const body = rows.map((row, number) => el("tr", rowProps ? rowProps(row, number) : {}, columns.map((c) => el("td", { class: c.n ? "n" : "" }, c.show(row)))));
  return el("div", { class: "tablewrap" }, el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}

export function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== undefined && pair[1] !== "").map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}
