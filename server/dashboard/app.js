// Asks the server once a second how it is, and shows it. Keeps five minutes of samples; says so when the server does not answer.
import { Playground } from "./playground.js";
import { Tiles } from "./tiles.js";
import { Speculation } from "./speculation.js";

const PERIOD_MS = 1000, PATIENCE_MS = 4000, KEPT_SECONDS = 300;
const $ = id => document.getElementById(id);

class Page {
  constructor() {
    this.samples = [];
    this.started = null;
    this.lost = 0;
    this.tiles = new Tiles($);
    this.speculation = new Speculation($);
    this.playground = new Playground($);
  }

  async run() {
    for (;;) {
      if (document.hidden) await new Promise(resolve => document.addEventListener("visibilitychange", resolve, { once: true }));
      try {
        const last = this.samples.at(-1)?.at ?? 0;
        const response = await fetch("debug/live?since=" + last, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
        if (!response.ok) throw new Error("status " + response.status);
        this.take(await response.json());
      } catch (error) {
        this.gone(error);
      }
      await new Promise(resolve => setTimeout(resolve, PERIOD_MS));
    }
  }

  take(live) {
    if (live.started !== this.started) {
      // Another server than before: its counts begin anew.
      this.samples = [];
      this.started = live.started;
      if (this.lost) return;
    }
    this.lost = 0;
    for (const [at, running, waiting, used, cached, tokens, prompt, turns, drafted, accepted] of live.history)
      this.samples.push({ at, running, waiting, used, cached, tokens, prompt, turns, drafted, accepted });
    this.samples = this.samples.filter(sample => sample.at >= live.now - KEPT_SECONDS);
    $("page").dataset.stale = live.model === null;
    this.status(live);
    this.tiles.show(live, this.samples);
    this.speculation.show(live, this.samples);
    this.playground.secured(live.secured);
  }

  status(live) {
    const progress = live.progress && `${live.progress.stage}, ${live.progress.done} of ${live.progress.total}`;
    const said = {
      ready: live.silence > 5 ? `The worker has been silent for ${Math.round(live.silence)} s` : "Live",
      loading: progress ? `Loading: ${progress}` : "Loading the model",
      draining: "Shutting down: finishing what runs",
      failed: "Failed: " + live.problem,
    }[live.phase];
    this.state(live.phase === "ready" && live.silence > 5 ? "failed" : live.phase, said);
  }

  gone(error) {
    this.lost += 1;
    $("page").dataset.stale = "true";
    const why = error.name === "TimeoutError" ? "The server does not answer" : "The server is gone";
    this.state("gone", `${why}, trying again`);
  }

  state(state, text) {
    $("status").dataset.state = state;
    if ($("status-text").textContent !== text) $("status-text").textContent = text;
    document.title = state === "ready" ? "Forerun" : `${text} · Forerun`;
  }
}

new Page().run();
