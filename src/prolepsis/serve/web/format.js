// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(Math.round(value));

export const counted = (value, noun) => `${count(value)} ${noun}${Math.round(value) === 1 ? "" : "s"}`;

export const share = (value) =>
  (Number.isFinite(value) ? `${(value * 100).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %` : "–");

export const ratio = (raw, coded) => (raw > 0 && coded > 0 ? `${(raw / coded).toFixed(2)}×` : "–");

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 99.95 ? `${value.toFixed(value < 9.995 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 || value === 0 ? count(value) : value.toFixed(1);
}

export function when(unixSeconds) {
  const time = new Date(unixSeconds * 1000);
  const today = time.toDateString() === new Date().toDateString();
  return today
    ? time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : time.toLocaleDateString([], { day: "numeric", month: "short" });
}
