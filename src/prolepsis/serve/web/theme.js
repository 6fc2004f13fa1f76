// Light, dark, or as the system has it.

import { byId } from "./dom.js";

const KEPT = "prolepsis-theme";
const ORDER = ["system", "light", "dark"];

export function startTheme(onChange) {
  let theme = localStorage.getItem(KEPT);
  const apply = () => {
    if (!ORDER.includes(theme)) theme = "system";
    document.documentElement.dataset.theme = theme;
    const label = `Colours: ${theme === "system" ? "as the system" : theme}`;
    byId("theme").title = label;
    byId("theme").setAttribute("aria-label", label);
    onChange();
  };
  byId("theme").addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    localStorage.setItem(KEPT, theme);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  apply();
}
