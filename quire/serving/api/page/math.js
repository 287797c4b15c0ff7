// Formulas as KaTeX draws them. Until KaTeX is there, and where it does not understand one, a formula is its source.

import { element } from "./elements.js";

const MAX_LENGTH = 10_000;  // longer ones stay source
const MAX_DRAWN = 500;
const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 25, maxExpand: 1000 };

const waiting = new Set();  // formulas that wait for KaTeX
const drawn = new Map();  // formulas by their source: a stream draws them again and again
let loading = null;

// The formula of `tex`, which is written in the text as `source`.
export function formula(tex, source, isDisplay) {
  const node = element("span", { class: isDisplay ? "math display" : "math", data: { source } }, source);
  if (isDisplay) node.tabIndex = 0;  // it may have to be scrolled
  if (tex.length > MAX_LENGTH) return node;
  node.tex = tex;
  if (globalThis.katex) draw(node);
  else {
    waiting.add(node);
    loading ??= load();
  }
  return node;
}

async function load() {
  const style = element("link", { rel: "stylesheet", href: new URL("katex/katex.min.css", import.meta.url).href });
  document.head.append(style);
  try {
    await import("./katex/katex.min.js");
    for (const node of waiting) draw(node);
  } catch {
    loading = null;  // the next formula tries again
  }
  waiting.clear();
}

function draw(node) {
  const { source } = node.dataset;
  if (!drawn.has(source)) {
    if (drawn.size >= MAX_DRAWN) drawn.clear();
    drawn.set(source, drawnOnce(node));
  }
  const made = drawn.get(source);
  if (!made) return;
  node.replaceChildren(made.cloneNode(true));
  node.dataset.drawn = "";
}

// What KaTeX makes of a formula; null where it is none.
function drawnOnce({ tex, classList }) {
  const made = element("span");
  try {
    globalThis.katex.render(tex, made, { ...OPTIONS, displayMode: classList.contains("display") });
    return made.firstElementChild;
  } catch {
    return null;
  }
}
