// Saved sessions: their messages, and their KV cache in the coded store.

import { ApiError, json } from "./api.js";
import { byId, iconButton, make, notify } from "./dom.js";
import { bytes, counted, ratio, seconds, when } from "./format.js";
import { setSystemPrompt } from "./settings.js";

const PATH = "/v1/sessions";
const KEPT = "prolepsis-session";

export class Sessions {
  /** `hooks`: needKey() asks for a key, showChat() leads to the conversation. */
  constructor(chat, hooks) {
    this.chat = chat;
    this.hooks = hooks;
    this.busy = false;
    const kept = chat.turns.length ? JSON.parse(sessionStorage.getItem(KEPT) ?? '{ "id": "", "unsaved": true }') : {};
    chat.unsaved = kept.unsaved ?? false;
    this.setCurrent(kept.id ?? "");
    byId("save-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
    byId("new-chat").addEventListener("click", () => {
      if (!this.mayDrop()) return;
      chat.load([]);
      this.setCurrent("");
      hooks.showChat();
      byId("question").focus();
    });
  }

  /** Ask for the list again. A server without a store has none, and is not asked. */
  async refresh() {
    try {
      const { store } = await json("/v1/engine");
      byId("save-form").hidden = !store;
      if (!store) byId("no-sessions").textContent = "Start the server with --store, and chats can be saved and resumed.";
      this.show(store ? (await json(PATH)).data : []);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.show([]);
      if (error.status === 401) this.hooks.needKey(error.message);
      else notify(error.message);
    }
  }

  show(sessions) {
    byId("no-sessions").hidden = sessions.length > 0;
    byId("session-list").replaceChildren(...sessions.map((session) => this.entry(session)));
    this.markCurrent();
  }

  entry(session) {
    const { id, tokens, raw_bytes: raw, coded_bytes: coded, created } = session;
    const size = `${counted(tokens, "token")} · ${bytes(coded)} (${ratio(raw, coded)})`;
    const title = `Resume: ${counted(tokens, "token")}, ${bytes(raw)} of KV cache in ${bytes(coded)}, saved ${when(created)}`;
    return make("li", { class: "session", "data-id": id },
      make("button", { type: "button", class: "resume", title, click: () => this.resume(id) },
        make("span", { class: "name" }, id), make("span", { class: "size" }, size)),
      iconButton("delete", `Delete session ${id}`, () => this.remove(id)));
  }

  /** The chat is now what was saved as `id`, or of no session if that is empty. */
  setCurrent(id) {
    this.current = byId("session-name").value = id;
    this.markCurrent();
    this.keep();
  }

  markCurrent() {
    for (const entry of byId("session-list").children) entry.classList.toggle("current", entry.dataset.id === this.current);
  }

  /** A reload forgets neither the chat nor where it belongs. */
  keep() {
    sessionStorage.setItem(KEPT, JSON.stringify({ id: this.current, unsaved: this.chat.unsaved }));
  }

  mayDrop() {
    return !this.chat.unsaved || confirm("This chat has turns that are not saved. Drop them?");
  }

  save() {
    const messages = this.chat.history();
    const suggested = suggestedName(this.chat.turns);
    return this.act(async () => {
      const { unsaved } = this.chat;
      this.chat.unsaved = false; // what is asked from here on is not part of it
      try {
        await this.saveAs(await this.freeName(suggested), messages);
      } catch (error) {
        this.chat.unsaved ||= unsaved;
        throw error;
      }
    });
  }

  async saveAs(id, messages) {
    const saved = await json(PATH, { method: "POST", body: { id, messages } });
    notify(`Saved: ${counted(saved.tokens, "token")}, ${bytes(saved.raw_bytes)} of KV cache in ${bytes(saved.coded_bytes)}`);
    this.setCurrent(id);
  }

  /** The name that was typed, or one like `suggested`: of the chat's own session, of none, or of one that may go. */
  async freeName(suggested) {
    const named = byId("session-name").value.trim();
    const ids = (await json(PATH)).data.map(({ id }) => id); // another tab may have saved some
    const id = named || unused(suggested, ids);
    if (id !== this.current && ids.includes(id) && !confirm(`Replace the session “${id}” by this chat?`)) {
      throw new ApiError("Nothing was saved: choose another name.", 0);
    }
    return id;
  }

  resume(id) {
    return this.act(async () => {
      const path = `${PATH}/${encodeURIComponent(id)}`;
      const session = await json(path);
      if (!session.messages.length) throw new ApiError("This session is a prompt that was saved through the API, not a chat.", 0);
      const { system, turns } = readable(session.messages);
      if (!this.mayDrop()) return;
      const { restored_tokens: restored, plan } = await json(`${path}/restore`, { method: "POST" });
      setSystemPrompt(system);
      this.chat.load(turns, plan);
      this.setCurrent(id);
      this.hooks.showChat();
      byId("question").focus();
      if (restored) notify(`Resumed: ${counted(restored, "token")} restored from ${plan.tier} in ${seconds(plan.seconds)}`);
      else notify(`Resumed: ${plan?.explanation ?? "all its tokens were still in the pool"}`);
    });
  }

  remove(id) {
    if (!confirm(`Delete the session “${id}”, its messages and its stored cache?`)) return null;
    return this.act(async () => {
      await json(`${PATH}/${encodeURIComponent(id)}`, { method: "DELETE" });
      if (id !== this.current) return;
      this.chat.unsaved = this.chat.turns.length > 0;
      this.setCurrent("");
    });
  }

  async act(action) {
    if (this.busy) return;
    const refocus = keepFocus();
    this.busy = true;
    byId("session-list").setAttribute("aria-busy", "true");
    this.offerButtons();
    try {
      await action();
    } catch (error) {
      if (error.status === 401) this.hooks.needKey(error.message);
      else notify(error.message);
    }
    await this.refresh();
    this.busy = false;
    byId("session-list").removeAttribute("aria-busy");
    this.chatChanged();
    refocus();
  }

  chatChanged() {
    this.keep();
    this.offerButtons();
  }

  /** Only a conversation that has come to rest can be saved, and none takes its place while it is. */
  offerButtons() {
    byId("new-chat").disabled = this.busy;
    byId("save").disabled = this.busy || this.chat.running !== null
      || !this.chat.turns.some(({ role, content }) => role === "assistant" && content);
  }
}

/** A conversation as this page has one, of messages as the API has them. */
function readable(messages) {
  if (messages.some(({ role, tool_calls: calls }) => role === "tool" || calls?.length)) {
    throw new ApiError("This session has tool calls, which this page cannot show.", 0);
  }
  const texts = messages.map(({ role, content }) => ({ role, content: text(content) }));
  const isSystem = ({ role }) => role === "system" || role === "developer";
  return {
    system: texts.filter(isSystem).map(({ content }) => content).join("\n\n"),
    turns: texts.filter((message) => !isSystem(message)),
  };
}

/** Parts are joined as the server joins them. */
const text = (content) => (Array.isArray(content) ? content.map((part) => part.text ?? "").join("\n") : content ?? "");

/** What gives the focus back to a button that cannot be used for a while, or to the one in its place in the list. */
function keepFocus() {
  const had = document.activeElement;
  const list = byId("session-list");
  const at = [...list.children].indexOf(had.closest(".session"));
  return () => {
    if (document.activeElement !== document.body) return;
    const entry = at < 0 ? null : list.children[Math.min(at, list.children.length - 1)];
    const button = had.isConnected ? had : entry?.querySelector(`.${had.classList[0]}`);
    (button ?? byId("new-chat")).focus();
  };
}

/** `name`, with a number where a session has it. */
function unused(name, ids) {
  let tried = name;
  for (let number = 2; ids.includes(tried); number += 1) tried = `${name} ${number}`;
  return tried;
}

function suggestedName(turns) {
  const words = turns[0].content.trim().split(/[\s/\p{C}]+/u).slice(0, 6).join(" ");
  return [...words].slice(0, 48).join("").replace(/^[. ]+|[. ]+$/g, "") || "Chat";
}
