// Addresses inside the page: #/0/rollouts?update=3. Every view can be linked to.

export function parseRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean);
  const params = Object.fromEntries(new URLSearchParams(query || ""));
  if (parts[0] === "compare") return { run: 0, view: "compare", rest: [], params };
  return { run: Number(parts[0] || 0) || 0, view: parts[1] || "overview", rest: parts.slice(2), params };
}

export function linkTo(run, view, params, ...rest) {
  const kept = Object.fromEntries(Object.entries(params || {}).filter(([, value]) => value !== undefined && value !== null && value !== ""));
  const query = new URLSearchParams(kept).toString();
  const path = view === "compare" ? "compare" : [run, view, ...rest].join("/");
  return `#/${path}${query ? "?" + query : ""}`;
}

export function goTo(link) {
  location.hash = link.slice(1);
}

// Changes the query of this view without a new entry in the browser's history.
export function setParams(changes) {
  const now = parseRoute();
  const link = linkTo(now.run, now.view, { ...now.params, ...changes }, ...now.rest);
  history.replaceState(null, "", link);
}
