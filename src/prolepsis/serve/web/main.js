// Puts the parts together, and asks the server how far it is.

import { ApiError, json, request } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { byId } from "./dom.js";
import { EngineView } from "./engine.js";
import { startKey } from "./key.js";
import { Sessions } from "./sessions.js";
import { startSettings } from "./settings.js";
import { startTheme } from "./theme.js";

const RETRY_MS = 2000;

let model = null;
let composer = null;
let sessions = null;

startSettings();
const needKey = startKey(() => connect());
const engine = new EngineView((phase, name) => {
  model = name ?? model; // the server may have been started again with another one
  show(phase, model);
});
startTheme(() => engine.redraw());
const chat = new Chat({
  model: () => model,
  needKey,
  edit: (text) => composer.edit(text),
  changed: () => {
    composer?.refresh();
    sessions?.chatChanged();
  },
});
composer = new Composer(chat);
sessions = new Sessions(chat, { needKey, showChat: () => go("chat") });
sessions.chatChanged();
startViews();
connect();

/** Wait until the server is ready, then show what it has. */
async function connect() {
  clearTimeout(connect.timer);
  try {
    await request("/health");
    model = (await json("/v1/models")).data[0].id;
    show("ready", model);
    await sessions.refresh();
    engine.start();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) {
      show("locked", "needs an API key");
      needKey(error.message);
      return;
    }
    show(error.status === 503 ? "loading" : "unreachable", error.message);
    connect.timer = setTimeout(connect, RETRY_MS);
  }
}

function show(phase, text) {
  byId("phase").dataset.phase = phase;
  byId("phase").textContent = phase;
  byId("model").textContent = text;
  byId("model").title = text;
}

/** Where there is no room for all views, show this one. */
function go(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("[data-go]")) {
    button.setAttribute("aria-pressed", String(button.dataset.go === view));
  }
  composer.refresh();
  engine.redraw();
}

function startViews() {
  for (const button of document.querySelectorAll("[data-go]")) {
    button.addEventListener("click", () => go(button.dataset.go));
  }
  byId("panel").addEventListener("click", () => {
    const hidden = document.body.classList.toggle("no-engine");
    byId("panel").setAttribute("aria-pressed", String(!hidden));
    engine.redraw();
  });
}
