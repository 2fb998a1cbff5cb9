// Numbers as people read them.

export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function short(value) {
  if (value >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (value >= 1e4) return (value / 1e3).toPrecision(3) + " k";
  if (value >= 100 || Number.isInteger(value)) return whole.format(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// A duration as [number, unit], three digits.
export function seconds(value) {
  if (value >= 100) return [whole.format(value), "s"];
  if (value >= 1) return [value.toPrecision(3), "s"];
  if (value >= 1e-3) return [digits(value * 1e3), "ms"];
  return [digits(value * 1e6), "µs"];
}

export const duration = value => seconds(value).join("\u00a0");
export const percent = share => (share > 0 && share < 0.01 ? "<1" : Math.round(share * 100)) + " %";
export const plural = (count, one, many = one + "s") => `${whole.format(count)} ${count === 1 ? one : many}`;

function digits(value) {
  return value >= 100 ? whole.format(value) : Number(value.toPrecision(value >= 10 ? 3 : 2)).toString();
}

export function element(tag, { data = {}, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  Object.assign(made.dataset, data);
  made.append(...children);
  return made;
}
