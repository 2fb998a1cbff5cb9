// A chart of a few series over one axis: drawn again in place, readable with pointer, keyboard and screen reader.
//
//   draw({ x, series: [values, …], domain: [from, to], ticks: [[x, label], …], label: x => text, nothing })
//
// `x` is ascending, `series` are parallel to it. Areas stack in their order. `nothing` is said where there is nothing to draw.
import { element } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000, HEIGHT = 100, LINES = 2;

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The next of 1, 2, 4, 6, 8, 10 … above: axes end on round numbers, and so do their halves.
function ceiling(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 4, 6, 8, 10].find(step => step * unit >= value * 0.999);
}

export class Chart {
  // `least`: the axis never ends below it. `format`: of a value, in the read-out and on the axis.
  constructor(figure, { title, series, format, least = 1, most = Infinity }) {
    Object.assign(this, { series, format, least, most, cursor: null, drawn: null });
    this.values = series.map(() => element("b", { textContent: "–" }));
    this.when = element("span", { className: "label when" });
    const keys = series.map((one, i) => element("span", {},
      element("i", { className: one.area ? "key" : "key line", data: { colour: one.colour } }), one.name + " ", this.values[i]));
    this.caption = element("figcaption", {}, element("b", { textContent: title }), element("span", { className: "readout" }, ...keys));
    this.plot = element("div", { className: "plot", tabIndex: 0 });
    this.plot.setAttribute("role", "img");
    this.title = title;
    const frame = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.labels = [];
    for (let i = 0; i <= LINES; i++) {
      const y = HEIGHT * (1 - i / LINES);
      frame.append(svg("line", { x1: 0, x2: WIDTH, y1: y, y2: y, class: i ? "" : "base" }));
      const label = element("span", { className: "label y" });
      label.style.top = `calc((100% - 20px) * ${1 - i / LINES})`;
      this.labels.push(label);
    }
    this.paths = series.map(one => {
      const pair = [one.area && svg("path", { class: "area" }), svg("path", { class: one.dashed ? "dashed" : "" })].filter(Boolean);
      for (const path of pair) path.dataset.colour = one.colour;
      frame.append(...pair);
      return pair;
    });
    this.line = svg("line", { y1: 0, y2: HEIGHT, class: "cursor", visibility: "hidden" });
    frame.append(this.line);
    this.ticks = element("div");
    this.nothing = element("p", { className: "nothing", hidden: true });
    this.plot.append(frame, ...this.labels, this.ticks, this.nothing, this.when);
    figure.append(this.caption, this.plot);
    this.frame = frame;
    this.plot.addEventListener("pointermove", event => this.point(event.clientX));
    this.plot.addEventListener("pointerleave", () => this.look(null));
    this.plot.addEventListener("blur", () => this.look(null));
    this.plot.addEventListener("keydown", event => this.key(event));
  }

  draw(data) {
    const { x, series, domain, ticks = [], nothing = "" } = data;
    this.drawn = data;
    const tops = this.stack(series);
    const top = Math.min(this.most, ceiling(Math.max(this.least, ...tops.flat())));
    const across = at => (WIDTH * (at - domain[0]) / (domain[1] - domain[0] || 1)).toFixed(1);
    const down = value => (HEIGHT * (1 - Math.min(value, top) / top)).toFixed(2);
    const floor = x.map(() => 0);
    this.paths.forEach((pair, i) => {
      const points = tops[i].map((value, at) => `${across(x[at])} ${down(value)}`);
      const below = (i && this.series[i].area ? tops[i - 1] : floor).map((value, at) => `${across(x[at])} ${down(value)}`).reverse();
      const edge = points.length ? "M" + points.join("L") : "";
      pair.at(-1).setAttribute("d", edge);
      if (pair.length > 1) pair[0].setAttribute("d", edge && `${edge}L${below.join("L")}Z`);
    });
    this.labels.forEach((label, i) => { label.textContent = this.format(top * i / LINES); });
    const shown = ticks.map(([at, text], i) => {
      const tick = element("span", { className: "label x" + (i ? i === ticks.length - 1 ? " last" : "" : " first"), textContent: text });
      tick.style.left = `calc(44px + (100% - 44px) * ${across(at) / WIDTH})`;
      return tick;
    });
    this.ticks.replaceChildren(...shown);
    this.nothing.textContent = nothing;
    this.nothing.hidden = !nothing;
    if (this.cursor !== null) this.cursor = Math.min(this.cursor, x.length - 1);
    this.read();
  }

  // Upper edges: areas lie on those before them, lines on the ground.
  stack(series) {
    let below = null;
    return series.map((values, i) => {
      if (!this.series[i].area) return values;
      const base = below;
      return below = base ? values.map((value, at) => value + base[at]) : values;
    });
  }

  point(clientX) {
    const { x, domain } = this.drawn ?? { x: [] };
    if (!x.length) return;
    const box = this.frame.getBoundingClientRect();
    const at = domain[0] + (domain[1] - domain[0]) * (clientX - box.left) / box.width;
    this.look(x.reduce((best, value, i) => Math.abs(value - at) < Math.abs(x[best] - at) ? i : best, 0));
  }

  key(event) {
    const last = (this.drawn?.x.length ?? 0) - 1, from = this.cursor ?? last + 1;
    const to = { ArrowLeft: Math.max(0, from - 1), ArrowRight: Math.min(last, from + 1), Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.look(to);
  }

  look(index) {
    this.cursor = index;
    this.read();
  }

  // The values under the cursor, or the last ones.
  read() {
    const { x = [], series = [], domain, label } = this.drawn ?? {};
    const at = this.cursor ?? x.length - 1;
    this.values.forEach((value, i) => { value.textContent = at >= 0 && series[i].length ? this.format(series[i][at]) : "–"; });
    this.when.textContent = this.cursor !== null && at >= 0 ? label(x[at]) : "";
    this.line.setAttribute("visibility", this.cursor !== null && at >= 0 ? "visible" : "hidden");
    if (at >= 0) {
      const place = WIDTH * (x[at] - domain[0]) / (domain[1] - domain[0] || 1);
      this.line.setAttribute("x1", place);
      this.line.setAttribute("x2", place);
      this.when.style.left = `calc(44px + (100% - 44px) * ${place / WIDTH})`;
      this.when.style.transform = `translateX(${-100 * place / WIDTH}%)`;
    }
    const told = this.series.map((one, i) => `${one.name} ${this.values[i].textContent}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}, ${this.when.textContent || "now"}: ${told}`);
  }
}
