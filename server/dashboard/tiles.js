// The numbers of now, and the charts of the last five minutes.
import { Chart } from "./chart.js";
import { duration, percent, plural, seconds, short, whole } from "./format.js";

const MINUTES = 5, MEAN_SECONDS = 5, SMOOTH = 3;

// What grew until each sample but the first, a second or per something else: over the last few seconds, for a line that can be read.
export function rates(samples, name, per = "at") {
  return samples.slice(1).map((sample, i) => {
    const before = samples[Math.max(0, i + 1 - SMOOTH)], by = sample[per] - before[per];
    return by > 0 ? (sample[name] - before[name]) / by : 0;
  });
}

// As `rates`, over the last few seconds.
function lately(samples, name, per = "at") {
  const last = samples.at(-1), first = samples.find(sample => sample.at >= last?.at - MEAN_SECONDS);
  return first && last[per] > first[per] ? (last[name] - first[name]) / (last[per] - first[per]) : 0;
}

export const timeAxis = now => ({
  domain: [now - 60 * MINUTES, now],
  ticks: [[now - 300, "5 min ago"], [now - 180, "3 min"], [now - 60, "1 min"], [now, "now"]],
  label: at => `${Math.round(now - at)} s ago`,
});

export class Tiles {
  constructor($) {
    this.$ = $;
    const computed = { name: "computed", colour: "computed", area: true }, guessed = { name: "guessed and accepted", colour: "guessed", area: true };
    this.rate = new Chart($("chart-rate"), { title: "Tokens per second", series: [computed, guessed], format: short, least: 10 });
    const running = { name: "running", colour: "computed", area: true }, waiting = { name: "waiting", colour: "third" };
    this.load = new Chart($("chart-load"), { title: "Sequences", series: [running, waiting], format: short, least: 4 });
    const used = { name: "in use", colour: "computed", area: true }, cached = { name: "cached", colour: "third" };
    this.kv = new Chart($("chart-kv"), { title: "KV cache", series: [used, cached], format: percent, least: 0.1, most: 1 });
  }

  show(live, samples) {
    const say = (id, text) => { this.$(id).textContent = text; };
    const model = live.model;
    say("model", model ? model.id.replace(/\/+$/, "").split("/").slice(-2).join("/") : "\u00a0");
    say("facts", model ? [model.device, model.dtype, model.speculator === "none" ? "no guesses" : model.speculator].join(" · ") : "");
    say("foot", `Forerun ${live.version}. ${plural(live.requests.received, "request")} since the start: ${whole.format(live.requests.answered)} answered, `
      + `${whole.format(live.requests.failed)} failed, ${whole.format(live.requests.overloaded)} refused because the server was full.`);
    if (!model) return;
    this.tiles(say, live, samples);
    this.charts(live, samples);
  }

  tiles(say, live, samples) {
    const last = samples.at(-1) ?? { running: 0, waiting: 0, used: 0, cached: 0 }, model = live.model;
    say("rate", short(lately(samples, "tokens")));
    say("rate-sub", `${short(lately(samples, "prompt"))} prompt tokens/s`);
    say("running", whole.format(last.running));
    say("running-sub", `${whole.format(last.waiting)} waiting · room for ${whole.format(model.max_concurrent_requests)}`);
    this.latency(say, "first", live.first_token, "no requests in the last minute");
    this.latency(say, "gap", live.between_tokens, "no tokens in the last minute");
    const pages = model.pages || 1, free = pages - last.used - last.cached;
    say("kv", percent(last.used / pages));
    say("kv-sub", `${percent(last.cached / pages)} cached · ${short(free * model.page_tokens)} tokens free`);
    const [used, cached] = this.$("kv-meter").children;
    used.style.width = 100 * last.used / pages + "%";
    cached.style.width = 100 * last.cached / pages + "%";
    this.$("kv-meter").setAttribute("aria-label", `KV cache: ${percent(last.used / pages)} in use, ${percent(last.cached / pages)} cached`);
    const first = samples[0], turns = last.turns - first?.turns, drafted = last.drafted - first?.drafted;
    say("yield", turns ? (1 + (last.accepted - first.accepted) / turns).toFixed(2) : "–");
    say("yield-sub", drafted ? `${percent((last.accepted - first.accepted) / drafted)} of guesses held` : model.speculator === "none" ? "guessing is off" : "no guesses lately");
  }

  latency(say, id, times, nothing) {
    const [number, unit] = times ? seconds(times.p50) : ["–", ""];
    say(id, number);
    say(id + "-unit", times ? unit + " median" : "median");
    say(id + "-sub", times ? `p95 ${duration(times.p95)} · p99 ${duration(times.p99)}` : nothing);
  }

  charts(live, samples) {
    const axis = timeAxis(live.now), x = samples.map(sample => sample.at), pages = live.model.pages || 1;
    const accepted = rates(samples, "accepted"), tokens = rates(samples, "tokens");
    const idle = samples.every(sample => sample.tokens === samples[0].tokens);
    const computed = tokens.map((rate, i) => Math.max(0, rate - accepted[i]));
    this.rate.draw({ ...axis, x: x.slice(1), series: [computed, accepted], nothing: idle ? "Nothing was generated in the last five minutes. Try the playground." : "" });
    this.load.draw({ ...axis, x, series: [samples.map(sample => sample.running), samples.map(sample => sample.waiting)] });
    this.kv.draw({ ...axis, x, series: [samples.map(sample => sample.used / pages), samples.map(sample => sample.cached / pages)] });
  }
}
