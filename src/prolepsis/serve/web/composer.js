// The field that questions are written in, and its keys.

import { byId } from "./dom.js";

const SUGGESTIONS = ["What is a KV cache?", "Explain entropy coding in three sentences.", "Write a Python function that reverses a list."];

export class Composer {
  constructor(chat) {
    this.chat = chat;
    this.field = byId("question");
    this.editing = false;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.field.addEventListener("keydown", (event) => this.key(event));
    this.field.addEventListener("input", () => this.refresh());
    byId("stop").addEventListener("click", () => this.stop());
    byId("cancel-edit").addEventListener("click", () => {
      this.endEdit();
      this.field.focus();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
      if (this.chat.running) this.stop();
      else if (this.editing) this.endEdit();
    });
    for (const text of SUGGESTIONS) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.addEventListener("click", () => {
        this.field.value = text;
        this.send();
      });
      byId("suggestions").append(button);
    }
    this.refresh();
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  send() {
    const text = this.field.value.trim();
    if (!text || this.chat.running) return;
    const editing = this.editing;
    this.endEdit();
    if (editing) this.chat.askInstead(text);
    else this.chat.ask(text);
    this.field.focus();
  }

  stop() {
    this.chat.stop();
    this.field.focus();
  }

  /** Take up the last question again; nothing is lost until the new one is sent. */
  edit(text) {
    this.editing = true;
    this.field.value = text;
    byId("editing").hidden = false;
    this.refresh();
    this.field.focus();
  }

  endEdit() {
    this.editing = false;
    this.field.value = "";
    byId("editing").hidden = true;
    this.refresh();
  }

  refresh() {
    const running = this.chat.running !== null;
    byId("send").hidden = running;
    byId("stop").hidden = !running;
    byId("send").disabled = this.field.value.trim() === "";
    this.field.style.height = "auto";
    const { scrollHeight } = this.field; // 0 while the view is hidden
    if (scrollHeight) this.field.style.height = `${Math.min(200, scrollHeight)}px`;
  }
}
