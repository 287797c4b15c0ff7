// Markdown within a paragraph: code, emphasis, links, formulas. Work grows with the text's length, also where nothing is closed.

import { element } from "./elements.js";
import { inlineMath } from "./markdown_math.js";

const MAX_DEPTH = 5;
const MAX_ADDRESS = 2048;
const SPECIAL = /[\\`*_~[!<\n$]|https?:\/\//g;
const MARKS = [["***", "strong"], ["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];
const ESCAPED = /[!-/:-@[-`{-~]/;
const ADDRESS = /https?:\/\/[^\s<>"'`]+/y;
const WORD = /[\p{L}\p{N}]/u;

export function inline(text, depth = 0) {
  const made = document.createDocumentFragment();
  const missing = new Set();  // marks that do not come again in this text
  let plain = "", at = 0;

  function append(node, next) {
    if (plain) made.append(plain);
    plain = "";
    made.append(node);
    at = next;
  }

  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    plain += text.slice(at, found.index);
    at = found.index;
    const part = special(text, at, depth, missing);
    if (part) append(...part);
    else if (text[at] === "\\" && ESCAPED.test(text[at + 1] ?? "")) { plain += text[at + 1]; at += 2; }
    else plain += text[at++];
  }
  made.append(plain + text.slice(at));
  return made;
}

// The node that begins at `at`, and where it ends; undefined where the character is a character.
function special(text, at, depth, missing) {
  switch (text[at]) {
    case "\\": case "$": return inlineMath(text, at, (mark, from) => find(text, mark, from, missing));
    case "\n": return [element("br"), at + 1];
    case "`": return code(text, at, missing);
    case "!": return text[at + 1] === "[" ? link(text, at + 1, depth, missing) : undefined;  // images stay links: nothing is loaded from elsewhere
    case "[": return link(text, at, depth, missing);
    case "h": return bareLink(text, at, at);
    case "<": return angleLink(text, at);
    case "*": case "_": case "~": return depth < MAX_DEPTH ? emphasis(text, at, depth, missing) : undefined;
  }
}

// Where `mark` comes next; remembered where it does not, so that nobody searches the rest again.
function find(text, mark, from, missing) {
  if (missing.has(mark)) return -1;
  const found = text.indexOf(mark, from);
  if (found < 0) missing.add(mark);
  return found;
}

function code(text, at, missing) {
  let length = 1;
  while (text[at + length] === "`") length++;
  const mark = "`".repeat(length), end = find(text, mark, at + length, missing);
  if (end < 0) return undefined;
  return [element("code", {}, text.slice(at + length, end).replace(/^ (.+) $/, "$1")), end + length];
}

function emphasis(text, at, depth, missing) {
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const start = at + mark.length;
    if (!text[start]?.trim() || (mark[0] === "_" && WORD.test(text[at - 1] ?? ""))) continue;
    let end = find(text, mark, start + 1, missing);
    if (mark.length === 1 && end >= 0 && text[end + 1] === mark) end = closing(text, mark, end);
    if (end < 0 || !text[end - 1].trim() || (mark[0] === "_" && WORD.test(text[end + mark.length] ?? ""))) continue;
    const made = element(name, {}, inline(text.slice(start, end), depth + 1));
    return [mark === "***" ? element("em", {}, made) : made, end + mark.length];
  }
}

// Behind pairs of the mark, which are another emphasis within this one.
function closing(text, mark, from) {
  while (from >= 0 && text[from + 1] === mark) {
    let end = from;
    while (text[end] === mark) end++;
    if ((end - from) % 2) return end - 1;
    from = text.indexOf(mark, end);
  }
  return from;
}

function link(text, at, depth, missing) {
  const middle = find(text, "](", at, missing);
  if (middle < 0 || middle - at > MAX_ADDRESS || depth >= MAX_DEPTH) return undefined;
  const end = endOfAddress(text, middle + 2);
  if (end < 0 || text.slice(at + 1, middle).includes("[")) return undefined;
  const target = text.slice(middle + 2, end).trim().split(/\s/)[0];
  const words = text.slice(at + 1, middle) || target;
  return [anchor(target, inline(words, MAX_DEPTH)) ?? words, end + 1];
}

// Where the bracket closes that was opened before `from`; -1 if it does not on this line.
function endOfAddress(text, from) {
  for (let at = from, open = 1; at < text.length && at < from + MAX_ADDRESS && text[at] !== "\n"; at++) {
    if (text[at] === "(") open++;
    if (text[at] === ")" && --open === 0) return at;
  }
  return -1;
}

function bareLink(text, at, start) {
  ADDRESS.lastIndex = start;
  const target = ADDRESS.exec(text)?.[0].replace(/[.,:;!?)\]*_~]+$/, "");
  const made = target && anchor(target, target);
  return made ? [made, start + target.length] : undefined;
}

function angleLink(text, at) {
  const made = bareLink(text, at, at + 1);
  return made && text[made[1]] === ">" ? [made[0], made[1] + 1] : undefined;
}

// A link that may be followed; null for all other schemes.
function anchor(target, words) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(target)) return null;
  return element("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, words);
}
