// Where data comes from: the server of this page, or, in a page that was written with --out, the page itself.
import { fromFile } from "./filedata.js";

const embedded = document.getElementById("data");
const stored = embedded ? JSON.parse(embedded.textContent) : null;

export const isFile = stored !== null;
export const fileNotes = stored ? stored.notes : [];

export async function get(path, params) {
  const given = Object.fromEntries(Object.entries(params || {}).filter(([, value]) => value !== undefined && value !== null && value !== ""));
  if (stored) return fromFile(stored, path, given);
  const query = new URLSearchParams(given).toString();
  const reply = await fetch(`api/${path}${query ? "?" + query : ""}`, { credentials: "same-origin" });
  const found = await reply.json().catch(() => ({ error: `the server answered ${reply.status}` }));
  if (!reply.ok) throw new Error(found.error || `the server answered ${reply.status}`);
  return found;
}
