// The conversation: what was said, the answer that is being written, and how to stop, repeat and edit.

import { ApiError, stream } from "./api.js";
import { announce, byId } from "./dom.js";
import { AnswerView, copy, questionView } from "./message.js";
import { sampling, systemPrompt } from "./settings.js";

const KEPT = "prolepsis-chat";

export class Chat {
  /** `hooks`: model() names the model, needKey() asks for one, changed() is told of every change. */
  constructor(hooks) {
    this.hooks = hooks;
    this.turns = []; // {role, content} as the API has them; answers also have statistics
    this.running = null; // the AbortController of the answer being written
    this.unsaved = false; // whether something was said since it was saved or loaded
    this.messages = byId("messages");
    this.scroller = byId("scroller");
    this.messages.addEventListener("click", (event) => {
      const button = event.target.closest("[data-copy]");
      if (button) copy(button.closest("figure").querySelector("code").textContent);
    });
    this.follows = true;
    this.scroller.addEventListener("scroll", () => {
      this.follows = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 60;
    });
    new ResizeObserver(() => this.follow()).observe(this.messages);
    this.load(JSON.parse(sessionStorage.getItem(KEPT) ?? "[]"));
  }

  /** What is sent: the system prompt, if there is one, and the turns, but for questions that got no answer. */
  history() {
    const unanswered = (turn, at) => turn.content === "" || this.turns[at + 1]?.content === "";
    const turns = this.turns.filter((turn, at) => !unanswered(turn, at)).map(({ role, content }) => ({ role, content }));
    return systemPrompt() ? [{ role: "system", content: systemPrompt() }, ...turns] : turns;
  }

  /** Show these turns in place of the conversation; `restored` is how their cache came into the pool, if it did. */
  load(turns, restored = null) {
    this.stop();
    this.restored = restored;
    this.turns = turns;
    this.unsaved = false;
    this.redraw();
  }

  redraw() {
    this.messages.replaceChildren();
    this.follows = true;
    for (const turn of this.turns) {
      if (turn.role === "user") this.showQuestion(turn);
      else this.showAnswer(turn);
    }
    this.mark();
    this.changed();
  }

  showQuestion(turn) {
    this.messages.append(questionView(turn.content, { onEdit: () => this.hooks.edit(turn.content) }));
  }

  showAnswer(turn) {
    const view = this.newAnswer();
    view.add(turn.content);
    view.end(turn.statistics ?? {}, turn.trouble ?? null);
  }

  newAnswer() {
    const view = new AnswerView({ onAgain: () => this.again() });
    this.messages.append(view.element);
    return view;
  }

  async ask(text) {
    this.stop();
    const turn = { role: "user", content: text };
    this.turns.push(turn);
    this.showQuestion(turn);
    await this.answer();
  }

  /** Take the last answer back and have another. */
  async again() {
    this.takeBack("assistant");
    this.redraw();
    byId("question").focus(); // the button is gone
    await this.answer();
  }

  /** Replace the last question, and what was answered, by another one. */
  async askInstead(text) {
    this.takeBack("assistant");
    this.takeBack("user");
    this.redraw();
    await this.ask(text);
  }

  takeBack(role) {
    this.stop();
    if (this.turns.at(-1)?.role === role) this.turns.pop();
  }

  /** Leave off writing; what is there stays. */
  stop() {
    this.running?.abort();
    this.running = null;
  }

  async answer() {
    const running = this.running = new AbortController();
    const history = this.history();
    const turn = { role: "assistant", content: "", statistics: {} };
    this.turns.push(turn);
    this.unsaved = true;
    const view = this.newAnswer();
    this.mark();
    this.follows = true;
    this.changed();
    announce("Answering");
    let trouble = null;
    try {
      await this.receive(history, turn, view, running.signal);
    } catch (error) {
      if (error.name === "AbortError") turn.statistics.finish = "stopped";
      else trouble = turn.trouble = this.explain(error);
    }
    view.end(turn.statistics, trouble);
    if (this.running === running) this.running = null;
    announce(trouble ?? turn.content);
    this.changed();
  }

  async receive(history, turn, view, signal) {
    const body = {
      model: this.hooks.model(), messages: history, stream: true, stream_options: { include_usage: true }, ...sampling(),
    };
    const clock = new Clock(turn.statistics, body.temperature > 0, this.restored);
    this.restored = null;
    try {
      for await (const event of stream("/v1/chat/completions", { method: "POST", body, signal })) {
        const choice = event.choices?.[0];
        const text = choice?.delta?.content ?? "";
        if (text) {
          turn.content += text;
          view.add(text);
        }
        clock.saw(text, choice?.finish_reason, event);
      }
    } finally {
      clock.end();
    }
    if (!turn.statistics.finish) throw new ApiError("The answer broke off: the connection was closed.", 0);
  }

  explain(error) {
    if (error.status === 401) this.hooks.needKey(error.message);
    if (error instanceof ApiError) return error.message;
    return error instanceof TypeError ? "The connection to the server broke off." : String(error.message ?? error);
  }

  /** Mark what may be edited and repeated: the last question and the last answer. */
  mark() {
    const last = (selector) => [...this.messages.querySelectorAll(selector)].at(-1);
    for (const button of this.messages.querySelectorAll("[aria-label='Edit question'], [aria-label='Answer again']")) {
      const own = button.closest("article");
      button.hidden = own !== last(".question") && own !== last(".answer");
    }
  }

  follow() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  changed() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(this.turns));
    } catch {
      sessionStorage.removeItem(KEPT); // too long to be kept
    }
    this.hooks.changed();
  }
}

/** Times an answer as its reader sees it. */
class Clock {
  /** `sampled`: whether a seed repeats the answer. `restored`: what was restored before it was asked for. */
  constructor(statistics, sampled, restored) {
    this.statistics = statistics;
    this.sampled = sampled;
    this.restored = restored;
    this.asked = performance.now();
    this.chunks = 0;
  }

  saw(text, finish, { usage, prolepsis }) {
    const now = performance.now();
    const statistics = this.statistics;
    if (text || finish) {
      statistics.first ??= (now - this.asked) / 1000;
      this.started ??= now;
      this.last = now;
    }
    if (text) this.chunks += 1;
    if (finish) statistics.finish = finish;
    if (!usage) return;
    statistics.tokens = usage.completion_tokens;
    statistics.prompt = usage.prompt_tokens;
    statistics.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const own = prolepsis?.choices?.[0] ?? {};
    statistics.restore = own.restore?.restored_tokens ? own.restore : this.restored ?? own.restore ?? null;
    statistics.seed = this.sampled ? own.seed ?? null : null; // greedy answers need none
    const between = own.inter_token_s ?? (this.last - this.started) / 1000 / (usage.completion_tokens - 1);
    if (between > 0) statistics.perSecond = 1 / between;
  }

  /** The server tells nothing of an answer that broke off: nearly every chunk had one token. */
  end() {
    if (this.statistics.tokens != null || !this.chunks) return;
    this.statistics.estimated = true;
    this.statistics.tokens = this.chunks;
    if (this.last > this.started) this.statistics.perSecond = (this.chunks - 1) / ((this.last - this.started) / 1000);
  }
}
