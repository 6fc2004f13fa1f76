// The live view: what the engine holds and does, once a second.

import { ApiError, stream } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { Chart } from "./chart.js";
import { byId, make } from "./dom.js";
import { bytes, count, counted, rate, share } from "./format.js";
import { KINDS, read } from "./snapshot.js";
import { showPlanner, showTiers } from "./store.js";

const PATH = "/v1/engine/events";
const LONGEST_WAIT_MS = 30000;

export class EngineView {
  /** `onPhase` is told what the server is doing, and with which model, as its events say or their absence. */
  constructor(onPhase) {
    this.onPhase = onPhase;
    this.map = new BlockMap();
    this.charts = {
      rate: new Chart("Tokens/s", rate, 10),
      batch: new Chart("Batch size", count, 4),
      usage: new Chart("Pool used", share, 0.1),
    };
    byId("charts").append(...Object.values(this.charts).map((chart) => chart.element));
    this.running = null;
    this.started = false;
    document.addEventListener("visibilitychange", () => this.run());
  }

  /** Follow the engine from now on, whenever the page can be seen. */
  start() {
    this.started = true;
    this.run();
  }

  redraw() {
    this.map.draw();
    for (const chart of Object.values(this.charts)) chart.draw();
  }

  async run() {
    if (document.hidden) this.running?.abort();
    if (document.hidden || !this.started || (this.running && !this.running.signal.aborted)) return;
    const running = this.running = new AbortController();
    let wait = 1000;
    let last = null;
    while (!running.signal.aborted) {
      try {
        for await (const event of stream(PATH, { signal: running.signal })) {
          wait = 1000;
          this.onPhase(event.phase, event.model);
          last = read(event, last);
          if (last) this.show(last);
        }
        this.tell("off", "connecting again");
      } catch (error) {
        if (error.name === "AbortError") break;
        this.tell("off", error.status ? error.message : "not connected");
        if (!error.status || error.status === 503) this.onPhase(error.status ? "loading" : "unreachable");
        if (error instanceof ApiError && [401, 404].includes(error.status)) break;
      }
      await new Promise((resolve) => { setTimeout(resolve, wait); });
      wait = Math.min(LONGEST_WAIT_MS, wait * 2);
    }
    running.abort();
  }

  tell(state, words) {
    byId("live").dataset.state = state;
    byId("live").textContent = words;
  }

  show(now) {
    this.tell("on", "live");
    this.showFigures(now);
    this.showPool(now.pool);
    this.charts.rate.add(now.tokensPerSecond);
    this.charts.batch.add(now.sequences);
    this.charts.usage.add(now.pool.usage);
    showTiers(now.store);
    showPlanner(now.store);
    this.showDrafts(now.drafts);
  }

  showFigures(now) {
    const waiting = now.waiting ? ` +${count(now.waiting)} waiting` : "";
    byId("figures").replaceChildren(
      figure("Tokens/s", rate(now.tokensPerSecond)),
      figure("Running", count(now.running), waiting),
      figure("From cache", share(now.cachedShare)),
      figure("Generated", count(now.generated)),
      figure("Preempted", count(now.preemptions)),
      figure("Pool waste", share(now.waste)),
    );
  }

  showPool(pool) {
    const words = pool.counts.map(({ word, number }) => `${count(number)} ${word}`).join(", ");
    this.map.show(pool.kinds, KINDS, pool.describe, words);
    byId("pool-text").textContent = `${counted(pool.kinds.length, "block")} · ${bytes(pool.bytes)} ${pool.dtype}`;
    byId("legend").replaceChildren(...pool.counts.map(({ style, word, number }) =>
      make("li", { class: style }, `${word} ${count(number)}`)));
  }

  showDrafts(drafts) {
    byId("drafts-card").hidden = !drafts;
    if (!drafts) return;
    byId("drafts-text").textContent = drafts.failure ? `${drafts.drafter}: ${drafts.failure}` : drafts.drafter;
    byId("drafts").replaceChildren(...drafts.acceptance.map((accepted, place) => {
      const bar = make("i");
      bar.style.height = `${Math.round(accepted * 42)}px`;
      return make("div", { class: "bar", title: `Place ${place + 1}: ${share(accepted)} accepted` },
        `${Math.round(accepted * 100)}%`, bar, String(place + 1));
    }));
  }
}

function figure(name, value, unit = "") {
  return make("div", {}, make("dt", {}, name), make("dd", {}, value, unit ? make("small", {}, unit) : null));
}
