// The live picture: cards that frames fill, and the engine that they are about.

import { BlockMap } from "./block_map.js";
import { Chart, compact } from "./chart.js";
import { byId, element } from "./elements.js";
import { EngineState } from "./engine_state.js";
import { Frames } from "./frames.js";
import { RequestsView } from "./requests_view.js";

const FACTS = [
  ["Running", ({ counts }) => counts.running],
  ["Waiting", ({ counts }) => counts.waiting],
  ["KV blocks held", ({ counts }) => [percent(counts.blocks - counts.free_blocks, counts.blocks), "%"]],
  ["Prefix hit rate", frame => frame.prefix_queries ? [percent(frame.prefix_hits, frame.prefix_queries), "%"] : "–"],
  ["Preemptions", ({ counts }) => counts.preemptions],
  ["Steps", frame => compact(frame.step)],
];
const KINDS = [["free", "Free"], ["cached", "Cached"], ["held", "Held"], ["shared", "Shared"]];

const percent = (part, whole) => whole ? Number((100 * part / whole).toFixed(part && part < whole * 0.1 ? 1 : 0)) : 0;

export class EngineView {
  #states = new Map();  // by engine
  #shown = null;  // the engine that is looked at
  #facts = FACTS.map(() => element("dd", {}, "–"));
  #sums = KINDS.map(() => element("span"));
  #mapNote = element("span", { class: "note" });
  #canvas = element("canvas", { class: "map", tabIndex: 0 });
  #map;
  #running = new RequestsView("Running", id => this.#map.choose(id));
  #waiting = new RequestsView("Waiting", () => {}, true);
  #tokens = new Chart("Tokens/s", "tokens/s", [
    { name: "answered", class: "first", swatch: "held", value: entry => entry.generated },
    { name: "computed", class: "second", swatch: "cached", value: entry => entry.computed },
  ]);
  #steps = new Chart("Step time", "ms", [{ class: "alone", value: entry => entry.stepMs }]);

  constructor(server) {
    byId("cards").append(this.#factsCard(), this.#tokens.node, this.#running.node, this.#waiting.node, this.#mapCard(), this.#steps.node);
    this.#tokens.node.classList.add("whole");
    this.#steps.node.classList.add("whole");
    const frames = new Frames(server);
    frames.addEventListener("frame", ({ detail }) => this.#apply(detail));
    frames.addEventListener("state", ({ detail }) => this.#sayState(detail, server));
    this.#lookWhileVisible(frames);
  }

  // Nothing is asked while the picture is not on the screen.
  #lookWhileVisible(frames) {
    let isShown = false;
    const look = () => frames.look(isShown && document.visibilityState === "visible");
    new IntersectionObserver(entries => { isShown = entries.at(-1).isIntersecting; look(); }).observe(byId("engine"));
    document.addEventListener("visibilitychange", look);
    addEventListener("pagehide", () => frames.look(false));
    addEventListener("pageshow", look);
  }

  #apply({ engines }) {
    for (const frame of engines) {
      if (!this.#states.has(frame.engine)) this.#addEngine(frame.engine);
      this.#states.get(frame.engine).apply(frame);
    }
    const state = this.#states.get(this.#shown);
    if (engines.some(frame => frame.engine === this.#shown)) this.#draw(state);
  }

  #addEngine(engine) {
    this.#states.set(engine, new EngineState());
    this.#shown ??= engine;
    const engines = byId("engines");
    engines.hidden = this.#states.size < 2;
    engines.replaceChildren(...[...this.#states.keys()].sort((a, b) => a - b).map(number => element("button", {
      type: "button", class: "quiet", aria: { pressed: String(number === this.#shown) }, on: { click: () => this.#choose(number) },
    }, `Engine ${number}`)));
  }

  #choose(engine) {
    this.#shown = engine;
    for (const button of byId("engines").children) button.setAttribute("aria-pressed", String(button.textContent === `Engine ${engine}`));
    this.#map.choose("");
    this.#draw(this.#states.get(engine));
  }

  #draw(state) {
    const { frame } = state, { counts } = frame;
    FACTS.forEach(([, value], at) => {
      const [text, unit] = [value(frame)].flat();
      this.#facts[at].replaceChildren(String(text), ...(unit ? [element("small", {}, ` ${unit}`)] : []));
    });
    const { sums } = state;
    const about = state.isSwept ? "" : "about ";
    KINDS.forEach(([kind], at) => { this.#sums[at].textContent = about + sums[kind].toLocaleString("en"); });
    this.#mapNote.textContent = `${counts.blocks.toLocaleString("en")} blocks of ${frame.block_size} tokens`;
    this.#canvas.setAttribute("aria-label", `Map of ${counts.blocks} blocks: ${KINDS.map(([kind]) => `${sums[kind]} ${kind}`).join(", ")}. Arrow keys go from block to block.`);
    this.#map.show(state);
    this.#running.show(frame.running, counts.running, frame.now);
    this.#waiting.show(frame.waiting, counts.waiting, frame.now);
    this.#tokens.draw(state.history);
    this.#steps.draw(state.history);
  }

  #sayState({ state, text }, server) {
    const said = byId("stream-state");
    if (said.textContent !== text) said.replaceChildren(text);
    said.dataset.state = state;
    if (state === "key") {
      const give = element("button", { type: "button", class: "quiet", on: { click: () => byId("give-key").click() } }, "Give it");
      said.append(" ", give);
    }
    byId("cards").classList.toggle("stale", state === "lost" && this.#states.size > 0);
  }

  #factsCard() {
    const facts = FACTS.map(([name], at) => element("div", {}, element("dt", {}, name), this.#facts[at]));
    return element("dl", { class: "card whole facts" }, ...facts);
  }

  #mapCard() {
    const swatches = KINDS.map(([kind]) => element("i", { class: `swatch ${kind}` }));
    const said = element("p", { class: "unseen", role: "status" });
    this.#canvas.setAttribute("role", "img");
    this.#canvas.setAttribute("aria-label", "Map of the KV blocks");
    const legend = element("ul", { class: "legend" }, ...KINDS.map(([, name], at) => element("li", {}, swatches[at], element("span", {}, name), this.#sums[at])));
    const card = element("section", { class: "card whole" },
      element("header", {}, element("h3", {}, "KV blocks"), this.#mapNote), element("div", {}, this.#canvas), legend, said);
    this.#map = new BlockMap(this.#canvas, swatches, said);
    return card;
  }
}
