// Where formulas stand in a text: $…$, $$…$$, \(…\), \[…\] and \begin{…}…\end{…}.

import { formula } from "./math.js";

const MAX_INLINE = 1000;  // characters between two dollars
const MAX_LINES = 200;
const DISPLAY = [["$$", "$$"], ["\\[", "\\]"]];
const ENVIRONMENT = /^[ \t]*\\begin\{((?:equation|align|alignat|gather|multline|matrix|[pbvBV]matrix|cases|array|split|aligned)\*?)\}/;

// A formula that begins with line `at` and ends with a later one or the same: its node, and the line behind it.
export function mathBlock(lines, at) {
  const line = lines[at].trimStart();
  if (line[0] !== "$" && line[0] !== "\\") return undefined;
  const environment = ENVIRONMENT.exec(lines[at]);
  if (environment) return upTo(lines, at, "", `\\end{${environment[1]}}`);
  const marks = DISPLAY.find(([open]) => line.startsWith(open));
  return marks && upTo(lines, at, ...marks);
}

function upTo(lines, at, open, close) {
  const last = Math.min(lines.length, at + MAX_LINES);
  for (let end = at; end < last; end++) {
    const found = lines[end].indexOf(close, end === at ? lines[at].indexOf(open) + open.length : 0);
    if (found < 0) continue;
    if (!/^[.,;]?\s*$/.test(lines[end].slice(found + close.length))) return undefined;  // words follow: a paragraph
    const source = [...lines.slice(at, end), lines[end].slice(0, found + close.length)].join("\n").trim();
    const tex = open ? source.slice(open.length, -close.length) : source;
    return tex.trim() ? [formula(tex, source, true), end + 1] : undefined;
  }
}

// A formula within a paragraph that begins at `at`: its node, and where it ends. `find` is the text search of inline().
// One that is not closed yet keeps the rest of the paragraph as it is written.
export function inlineMath(text, at, find) {
  if (text[at] === "$" && text[at + 1] !== "$") return dollars(text, at);
  const [open, close] = { "$$": ["$$", "$$"], "\\(": ["\\(", "\\)"], "\\[": ["\\[", "\\]"] }[text.slice(at, at + 2)] ?? [];
  if (!open) return undefined;
  const end = find(close, at + 2);
  if (end < 0) return open === "$$" ? undefined : [text.slice(at), text.length];
  const source = text.slice(at, end + 2), tex = text.slice(at + 2, end);
  return [tex.trim() ? formula(tex, source, open !== "\\(") : source, end + 2];
}

// Between single dollars there is no space at the edges, and no digit follows: prices are no formulas.
function dollars(text, at) {
  if (!text[at + 1]?.trim()) return undefined;
  const last = Math.min(text.length, at + MAX_INLINE);
  for (let end = at + 2; end < last; end++) {
    if (text[end] === "\\") { end++; continue; }
    if (text[end] !== "$") continue;
    if (!text[end - 1].trim() || /\d/.test(text[end + 1] ?? "")) return undefined;
    return [formula(text.slice(at + 1, end), text.slice(at, end + 1), false), end + 1];
  }
}
