// Saved sessions: their messages, and their KV cache in the coded store.

import { ApiError, json } from "./api.js";
import { byId, iconButton, make, notify } from "./dom.js";
import { bytes, counted, ratio, seconds, when } from "./format.js";
import { setSystemPrompt } from "./settings.js";

const PATH = "/v1/sessions";

export class Sessions {
  /** `hooks`: needKey() asks for a key, showChat() leads to the conversation. */
  constructor(chat, hooks) {
    this.chat = chat;
    this.hooks = hooks;
    this.busy = false;
    byId("save-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
    byId("new-chat").addEventListener("click", () => {
      chat.load([]);
      this.showCurrent("");
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
    this.showCurrent(byId("session-name").value);
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

  showCurrent(id) {
    byId("session-name").value = id;
    for (const entry of byId("session-list").children) entry.classList.toggle("current", entry.dataset.id === id);
  }

  save() {
    const id = byId("session-name").value.trim() || suggestedName(this.chat.turns);
    return this.act(async () => {
      const saved = await json(PATH, { method: "POST", body: { id, messages: this.chat.history() } });
      notify(`Saved: ${counted(saved.tokens, "token")}, ${bytes(saved.raw_bytes)} of KV cache in ${bytes(saved.coded_bytes)}`);
      byId("session-name").value = id;
    });
  }

  resume(id) {
    return this.act(async () => {
      const path = `${PATH}/${encodeURIComponent(id)}`;
      const session = await json(path);
      if (!session.messages.length) throw new ApiError("This session is a prompt that was saved through the API, not a chat.", 0);
      const { system, turns } = readable(session.messages);
      const { restored_tokens: restored, plan } = await json(`${path}/restore`, { method: "POST" });
      setSystemPrompt(system);
      this.chat.load(turns, plan);
      byId("session-name").value = id;
      this.hooks.showChat();
      if (restored) notify(`Resumed: ${counted(restored, "token")} restored from ${plan.tier} in ${seconds(plan.seconds)}`);
      else notify(`Resumed: ${plan?.explanation ?? "all its tokens were still in the pool"}`);
    });
  }

  remove(id) {
    if (!confirm(`Delete the session “${id}”, its messages and its stored cache?`)) return null;
    return this.act(() => json(`${PATH}/${encodeURIComponent(id)}`, { method: "DELETE" }));
  }

  async act(action) {
    if (this.busy) return;
    this.busy = true;
    byId("session-list").setAttribute("aria-busy", "true");
    this.offerSave();
    try {
      await action();
    } catch (error) {
      if (error.status === 401) this.hooks.needKey(error.message);
      else notify(error.message);
    }
    this.busy = false;
    byId("session-list").removeAttribute("aria-busy");
    this.offerSave();
    await this.refresh();
  }

  /** Only a conversation that has come to rest can be saved. */
  offerSave() {
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

function suggestedName(turns) {
  const words = turns[0].content.trim().split(/[\s/\p{C}]+/u).slice(0, 6).join(" ");
  return [...words].slice(0, 48).join("").replace(/^[. ]+|[. ]+$/g, "") || "Chat";
}
