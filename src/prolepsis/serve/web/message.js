// How a question and an answer look. Both are text of other people and of models: they go in as text nodes.

import { iconButton, make, notify } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { render } from "./markdown.js";

export function questionView(text, { onEdit }) {
  const actions = make("span", { class: "actions" }, iconButton("copy", "Copy question", () => copy(text)),
    iconButton("edit", "Edit question", onEdit));
  return make("article", { class: "question", "aria-label": "You" },
    make("div", { class: "text" }, text), make("div", { class: "foot" }, actions));
}

/** An answer that grows. */
export class AnswerView {
  constructor({ onAgain }) {
    this.text = "";
    this.body = make("div", { class: "text" });
    this.foot = make("div", { class: "foot" });
    this.element = make("article", { class: "answer pending", "aria-label": "Prolepsis", "aria-busy": "true" },
      this.body, this.foot);
    this.actions = make("span", { class: "actions" }, iconButton("copy", "Copy answer", () => copy(this.text)),
      iconButton("again", "Answer again", onAgain));
    this.frame = 0;
  }

  /** Show more of the answer, at most once a frame. */
  add(text) {
    this.text += text;
    this.frame ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    render(this.body, this.text);
  }

  /** Nothing more comes. `statistics` may be empty, `trouble` is what went wrong or null. */
  end(statistics, trouble = null) {
    this.paint();
    this.element.classList.remove("pending");
    this.element.removeAttribute("aria-busy");
    if (trouble) this.element.insertBefore(make("p", { class: "trouble", role: "alert" }, trouble), this.foot);
    this.foot.replaceChildren(this.actions, ...figures(statistics));
  }
}

function figures(statistics) {
  const shown = [];
  const add = (value, unit, kind = "") =>
    shown.push(make("span", { class: `figure ${kind}` }, make("b", {}, value), ` ${unit}`));
  const about = statistics.estimated ? "about " : "";
  if (statistics.tokens != null) add(about + count(statistics.tokens), statistics.tokens === 1 ? "token" : "tokens");
  if (statistics.perSecond) add(about + rate(statistics.perSecond), "tokens/s");
  if (statistics.first != null) add(seconds(statistics.first), "to first token");
  if (statistics.finish === "length") shown.push(make("span", { class: "figure" }, "cut at max tokens"));
  if (statistics.finish === "stopped") shown.push(make("span", { class: "figure" }, "stopped"));
  if (statistics.cached) add(`${count(statistics.cached)} of ${count(statistics.prompt)}`, cacheText(statistics), "cached");
  const { reason, explanation } = statistics.restore ?? {};
  if (explanation && !["restore_is_faster", "nothing_stored"].includes(reason)) {
    shown.push(make("span", { class: "cached" }, `Store: ${explanation}`));
  }
  if (statistics.seed != null) shown.push(make("span", { class: "figure" }, `seed ${statistics.seed}`));
  return shown;
}

/** How the prompt's cached tokens came: from the pool, or restored from a tier of the store. */
function cacheText({ cached, restore }) {
  if (!restore?.restored_tokens || restore.restored_tokens > cached) return "prompt tokens were in the pool";
  const came = [`${count(restore.restored_tokens)} restored from ${restore.tier} in ${seconds(restore.seconds)}`];
  if (restore.predictor) came[0] += ` (${restore.predictor})`;
  const pool = cached - restore.restored_tokens;
  if (pool > 0) came.unshift(`${count(pool)} in the pool`);
  return `prompt tokens: ${came.join(", ")}`;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    notify("Copied");
  } catch {
    notify("The browser did not allow copying.");
  }
}
