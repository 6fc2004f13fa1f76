// The dialog that asks for an API key.

import { key, setKey } from "./api.js";
import { byId } from "./dom.js";

const HINT = "Kept until this tab is closed, and sent to this server only.";

/** `onKey` is called when the key has changed. Returns a function that asks, saying why. */
export function startKey(onKey) {
  const dialog = byId("key-dialog");
  const ask = (why = "") => {
    byId("key-why").textContent = why ? `${why} ${HINT}` : HINT;
    byId("key-input").value = key();
    if (!dialog.open) dialog.showModal();
  };
  byId("key-button").addEventListener("click", () => ask());
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-form").addEventListener("submit", () => {
    setKey(byId("key-input").value.trim());
    onKey();
  });
  return ask;
}
