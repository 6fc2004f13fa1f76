// The sampling settings, kept in this browser.

import { byId } from "./dom.js";

const KEPT = "prolepsis-settings";
const SLIDERS = ["temperature", "top_p"];

const form = () => byId("settings");

/** Fill in what was kept, and keep what changes. */
export function startSettings() {
  const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
  for (const field of form().elements) if (field.name in kept) field.value = kept[field.name];
  form().addEventListener("input", () => {
    showSliders();
    localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(new FormData(form()))));
  });
  form().addEventListener("submit", (event) => event.preventDefault());
  byId("reset-settings").addEventListener("click", () => {
    form().reset();
    localStorage.removeItem(KEPT);
    showSliders();
  });
  showSliders();
}

function showSliders() {
  for (const name of SLIDERS) form().elements[`${name}_shown`].value = Number(form().elements[name].value).toFixed(2);
}

export const systemPrompt = () => form().elements.system.value.trim();

/** Put in the system prompt that a resumed conversation began with. */
export function setSystemPrompt(text) {
  form().elements.system.value = text;
  form().dispatchEvent(new Event("input"));
}

/** The fields of a request. What the server would refuse (an empty or bad number) is left to its own default. */
export function sampling() {
  const fields = {};
  for (const name of SLIDERS) fields[name] = Number(form().elements[name].value);
  for (const name of ["max_tokens", "seed"]) {
    const field = form().elements[name];
    if (field.value !== "" && field.validity.valid) fields[name] = Number(field.value);
  }
  return fields;
}
