// The coded store: its tiers, and what the planner decided.

import { byId, make } from "./dom.js";
import { bytes, count, counted, ratio, seconds, share } from "./format.js";

const DECISIONS = {
  restore_is_faster: "restored",
  recompute_is_faster: "computed, which was faster",
  nothing_stored: "nothing stored",
  timed_out: "broken off: a tier was too slow",
  damaged: "broken off: a segment was damaged",
  no_room: "broken off: no room in the pool",
  failed: "broken off: it failed",
  cancelled: "cancelled",
};

/** `store` as the server tells of it; null where it has none. */
export function showTiers(store) {
  const { segments, tiers } = store ?? { segments: null, tiers: [] };
  byId("store-text").textContent = segments?.stored_coded_bytes
    ? `${bytes(segments.stored_raw_bytes)} → ${bytes(segments.stored_coded_bytes)} · `
      + ratio(segments.stored_raw_bytes, segments.stored_coded_bytes)
    : "";
  byId("tiers").replaceChildren(...(store ? tiers.map(tierView) : [
    make("p", { class: "hint" }, "This server was started without --store: no cache outlives the pool.")]));
}

function tierView(tier) {
  const held = tier.bytes == null ? "" : bytes(tier.bytes) + (tier.budget ? ` of ${bytes(tier.budget)}` : "");
  const parts = [make("span", { class: "name", title: tier.name }, tier.name), make("span", {}, held)];
  if (tier.budget) {
    const fill = make("i");
    fill.style.width = `${Math.min(100, (100 * tier.bytes) / tier.budget)}%`;
    parts.push(make("div", { class: "meter" }, fill));
  }
  parts.push(make("p", { class: "detail" }, make("span", {}, asked(tier)), make("span", {}, troubles(tier))));
  return make("div", { class: tier.available ? "tier" : "tier away" }, parts);
}

function asked({ gets, hits, get_bytes: got, get_seconds: spent }) {
  if (!gets) return "not asked yet";
  return `${share(hits / gets)} of ${counted(gets, "lookup")}${spent > 0 && got > 0 ? `, ${bytes(got / spent)}/s` : ""}`;
}

function troubles({ entries, evictions, failures }) {
  const failed = Object.values(failures).reduce((sum, number) => sum + number, 0);
  if (failed) return counted(failed, "failure");
  if (evictions) return counted(evictions, "eviction");
  return entries == null ? "" : `${count(entries)} held`;
}

export function showPlanner(store) {
  const rows = [];
  const row = (name, value) => rows.push(make("dt", {}, name), make("dd", {}, value));
  const told = store?.segments ?? { decisions: {} };
  for (const [reason, number] of Object.entries(told.decisions)) row(DECISIONS[reason] ?? reason, count(number));
  if (told.restored_tokens) row("tokens restored", `${count(told.restored_tokens)} in ${seconds(told.restore_seconds)}`);
  for (const [name, number] of [["damaged", told.damaged_segments], ["missed", told.missed_segments]]) {
    if (number) row(`segments ${name}`, count(number));
  }
  byId("planner-card").hidden = rows.length === 0;
  byId("planner").replaceChildren(...rows);
}
