// Numbers and times as people read them.

export function count(value) {
  return value === null || value === undefined ? "-" : Math.round(value).toLocaleString("en");
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 100 || (Number.isInteger(value) && size >= 1)) return value.toFixed(0);
  if (size >= 1) return value.toFixed(2);
  if (size >= 0.001 || size === 0) return value.toFixed(size === 0 ? 0 : 3);
  return value.toExponential(1);
}

export function percent(value, digits = 0) {
  return value === null || value === undefined ? "-" : `${(100 * value).toFixed(digits)}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} us`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(2)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function reward(value) {
  return value === null || value === undefined ? "-" : Number.isInteger(value) ? value.toFixed(0) : value.toFixed(3);
}

export function day(text) {
  const date = new Date(text);
  return Number.isNaN(date.getTime()) ? text : date.toISOString().slice(0, 16).replace("T", " ") + " UTC";
}
