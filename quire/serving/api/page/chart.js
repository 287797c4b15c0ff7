// A line over the last minutes.

import { element, svg } from "./elements.js";

const WIDTH = 300, HEIGHT = 60;
const SPANS = [[60, "1 minute ago"], [300, "5 minutes ago"]];  // the shortest that has the history, in seconds

export class Chart {
  #svg = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  #lines;
  #top = element("span", { class: "note" });
  #begin = element("span");

  // `lines`: {name, class, value(entry)} of each; a value may be null.
  constructor(title, unit, lines) {
    this.title = title;
    this.unit = unit;
    this.#lines = lines.map(line => ({ ...line, now: element("span"), group: svg("g") }));
    this.#svg.append(svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }), svg("line", { x1: 0, x2: WIDTH, y1: 0, y2: 0 }), ...this.#lines.map(line => line.group).reverse());
    const legend = this.#lines.map(line => element("span", { class: "note now" },
      ...(lines.length > 1 ? [element("i", { class: `swatch ${line.swatch}` })] : []), line.now));
    this.node = element("section", { class: "card" },
      element("header", {}, element("h3", {}, title), ...legend), this.#svg,
      element("div", { class: "axis" }, this.#begin, this.#top, element("span", {}, "now")));
  }

  draw(history) {
    const end = history.findLast(Boolean)?.now ?? 0;
    const known = history.filter(Boolean), age = end - (known[0]?.now ?? end);
    const [span, begin] = SPANS.find(([seconds]) => age <= seconds) ?? SPANS.at(-1);
    this.#begin.textContent = begin;
    const most = roundUp(Math.max(1e-9, ...this.#lines.flatMap(line => known.map(entry => line.value(entry) ?? 0))));
    for (const line of this.#lines) {
      line.group.replaceChildren(...stretches(history, line.value).map(part => svg("polyline", {
        class: line.class,
        points: part.map(entry => `${(WIDTH * (1 - (end - entry.now) / span)).toFixed(1)},${(HEIGHT * (1 - line.value(entry) / most)).toFixed(1)}`).join(" "),
      })));
      const value = known.length ? line.value(known.at(-1)) : null;
      line.now.textContent = value === null ? "–" : `${compact(value)} ${line.name ?? this.unit}`;
    }
    this.#top.textContent = most > 1e-9 ? `top line ${compact(most)} ${this.unit}` : "";
    this.#svg.setAttribute("aria-label", `${this.title} over the last minutes, up to ${compact(most)} ${this.unit}; now ${this.#lines.map(line => line.now.textContent).join(", ")}`);
  }
}

// The history between its gaps.
function stretches(history, value) {
  const parts = [[]];
  for (const entry of history) {
    if (entry && value(entry) !== null) parts.at(-1).push(entry);
    else parts.push([]);
  }
  return parts.filter(part => part.length);
}

// 1, 2 or 5 times a power of ten, at least `value`.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find(times => times * power >= value * 0.999);
}

export function compact(value) {
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return value === 0 ? "0" : value < 0.01 ? "<0.01" : String(Number(value.toPrecision(2)));
}
