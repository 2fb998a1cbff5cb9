// What guessing brings, and what the controller makes of it. Of several replicas the one that is chosen: each has its own controller.
import { Chart } from "./chart.js";
import { duration, element, percent, plural, short, whole } from "./format.js";
import { rates, timeAxis } from "./tiles.js";

const STATES = { closed: "guesses pay", "half-open": "on trial", open: "switched off" };
const ORDINALS = ["1st", "2nd", "3rd"];
const drifted = drift => Math.abs(drift - 1) < 0.02 ? "as fast" : `${Math.round(100 * Math.abs(drift - 1))} % ${drift > 1 ? "slower" : "faster"}`;
const row = (...cells) => element("tr", {}, ...cells);

export class Speculation {
  constructor($) {
    this.$ = $;
    const drafted = { name: "guessed", colour: "computed", area: true }, accepted = { name: "accepted", colour: "guessed" };
    this.guesses = new Chart($("chart-guesses"), { title: "Guesses per step, a sequence", series: [drafted, accepted], format: short, least: 2 });
    const profiled = { name: "as profiled", colour: "computed", dashed: true }, now = { name: "now", colour: "guessed" };
    this.costs = new Chart($("chart-costs"), { title: "Time of a step, by tokens computed together", series: [profiled, now], format: value => value ? duration(value) : "0", least: 1e-6 });
  }

  show(live, samples) {
    if (!live.model) return;
    const thoughts = live.speculation[this.replica(live.speculation.length)], off = !thoughts || thoughts.controller.controller === "none";
    this.$("speculation-grid").hidden = off;
    this.$("speculation-says").textContent = off
      ? "Guessing is off. Start the server without --speculator none and --speculate 0 to see what it brings; the output stays the same."
      : `${live.model.speculator}, ${thoughts.controller.controller} controller`;
    if (off) return;
    this.acceptance(thoughts.survival);
    this.chart(live, samples);
    this.controller(thoughts.controller);
    this.guards(thoughts.controller.guards);
    this.table(thoughts.controller.costs);
  }

  // The index of the chosen one; there is nothing to choose where there is one.
  replica(count) {
    const chosen = this.$("replica");
    this.$("replica-field").hidden = count < 2;
    while (chosen.options.length > count) chosen.remove(count);
    while (chosen.options.length < count) chosen.add(new Option(`${chosen.options.length + 1} of ${count}`));
    for (const [i, option] of [...chosen.options].entries()) option.text = `${i + 1} of ${count}`;
    return Math.max(0, chosen.selectedIndex);
  }

  acceptance(survival) {
    const sources = Object.entries(survival), depth = Math.max(1, ...sources.map(([, curve]) => curve.drafted.length));
    const places = Array.from({ length: depth }, (_, i) => i);
    const head = row(element("th", { scope: "col", textContent: "source" }), ...places.map(i => element("th", { scope: "col", textContent: ORDINALS[i] ?? `${i + 1}th` })));
    const body = sources.map(([name, curve]) => row(element("th", { scope: "row", textContent: name, title: name }), ...places.map(i => this.cell(curve, i))));
    this.$("acceptance").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  }

  cell(curve, i) {
    const drafted = curve.drafted[i] ?? 0, share = drafted ? Math.min(1, curve.accepted[i] / drafted) : 0;
    const cell = element("td", {}, drafted >= 1 ? percent(share) : "–", element("small", { textContent: drafted >= 1 ? short(Math.round(drafted)) : "\u00a0" }));
    cell.style.background = `color-mix(in srgb, var(--guessed) ${drafted >= 1 ? Math.round(6 + 44 * share) : 3}%, transparent)`;
    return cell;
  }

  chart(live, samples) {
    const drafted = rates(samples, "drafted", "turns"), accepted = rates(samples, "accepted", "turns");
    const none = drafted.every(value => !value);
    this.guesses.draw({ ...timeAxis(live.now), x: samples.slice(1).map(sample => sample.at), series: [drafted, accepted], nothing: none ? "No guesses in the last five minutes." : "" });
  }

  controller(thoughts) {
    const facts = [
      ["Guesses in the last step", thoughts.guessing ? `${whole.format(thoughts.budget)} at most` : "none"],
      ["A guess pays from a chance of", percent(thoughts.price)],
      ["Expected speed, guessing over not", "× " + thoughts.gain.toFixed(2)],
      ["Last step, as expected", duration(thoughts.expected_seconds)],
      ["Last step, as measured", duration(thoughts.measured_seconds)],
      ["Drafting for one sequence", thoughts.drafting.length > 1 ? duration(thoughts.drafting[1]) : "–"],
      ["Guesses that hold, per draft", thoughts.earned.toFixed(2)],
      ["Machine, against its profile", drifted(thoughts.drift)],
    ];
    this.$("controller").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", { textContent: name }), element("dd", { textContent: value })]));
  }

  guards(guards) {
    const items = Object.entries(guards).map(([least, guard]) => element("li", {},
      element("span", { textContent: least === "1" ? "1 sequence" : `${least} sequences and more` }),
      element("b", { textContent: STATES[guard.state], data: { state: guard.state } }),
      ...(guard.openings ? [element("small", { textContent: `was switched off ${plural(guard.openings, "time")}, last for ${plural(guard.wait, "step")}` })] : [])));
    this.$("guards").replaceChildren(...(items.length ? items : [element("li", { className: "none", textContent: "Nothing was guessed yet." })]));
  }

  table(costs) {
    const x = costs.map(([rows]) => Math.log2(rows)), most = costs.at(-1)?.[0] ?? 1;
    const ticks = [1, 4, 16, 64, 256].filter(rows => rows < most / 1.5 || rows === 1).concat(most > 1 ? [most] : []).map(rows => [Math.log2(rows), rows === 1 ? "1 token" : `${rows}`]);
    const series = [costs.map(([, profiled]) => profiled), costs.map(([, , now]) => now)];
    this.costs.draw({ x, series, domain: [0, Math.log2(most) || 1], ticks, label: at => plural(Math.round(2 ** at), "token"), nothing: costs.length ? "" : "No profile: this controller does not need one." });
    const head = row(...["tokens", "as profiled", "now", "each"].map(textContent => element("th", { scope: "col", textContent })));
    const body = costs.map(([rows, profiled, now]) => row(element("th", { scope: "row", textContent: whole.format(rows) }),
      ...[profiled, now, now / rows].map(value => element("td", { textContent: duration(value) }))));
    this.$("costs").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  }
}
