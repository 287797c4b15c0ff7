// Markdown as DOM nodes: the part of it that models write. Whatever is no markdown is text; HTML is text, too.
//
// Owns the blocks; markdown_inline.js has what stands within a line.

import { codeColours } from "./code_colours.js";
import { copyButton, element } from "./elements.js";
import { inline } from "./markdown_inline.js";
import { mathBlock } from "./markdown_math.js";
import { formula } from "./math.js";

const MAX_DEPTH = 8;  // of quotes and lists within each other; what is deeper is text
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TASK = /^\[([ xX])\][ \t]+/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(?:[ \t]+(.*))?$/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

export function markdown(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const made = document.createDocumentFragment();
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) at++;
    else at = depth > MAX_DEPTH ? paragraph(lines, at, made) : block(lines, at, made, depth);
  }
  return made;
}

// One block from line `at` on; says where the next one begins.
function block(lines, at, made, depth) {
  const line = lines[at];
  let found;
  if (found = FENCE.exec(line)) return fence(lines, at, found, made);
  if (found = HEADING.exec(line)) {
    const level = Math.min(6, found[1].length + 3);  // the page has its own above
    const words = found[2].trimEnd().replace(/(?<=[ \t]|^)#+$/, "");
    if (words) made.append(element(`h${level}`, {}, inline(words)));  // one that is not written yet is no heading
    return at + 1;
  }
  if (found = mathBlock(lines, at)) { made.append(found[0]); return found[1]; }
  if (RULE.test(line)) { made.append(element("hr")); return at + 1; }
  if (QUOTE.test(line)) return quote(lines, at, made, depth);
  if (ITEM.test(line)) return list(lines, at, made, depth);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return table(lines, at, made);
  return paragraph(lines, at, made);
}

function fence(lines, at, [, mark, about], made) {
  const code = [];
  for (at++; at < lines.length; at++) {
    const end = lines[at].trim();
    if (end.startsWith(mark) && !end.slice(mark.length).replaceAll(mark[0], "")) { at++; break; }
    code.push(lines[at]);
  }
  const language = about.trim().split(/\s/)[0], text = code.join("\n");
  made.append(language === "math" && text.trim() ? formula(text, text, true) : listing(text, language));
  return at;
}

function listing(code, language) {
  const head = element("div", {}, element("span", {}, language || "text"), copyButton("Copy", button => button.closest(".listing").querySelector("code").textContent));
  const text = element("pre", { tabIndex: 0 }, element("code", {}, language ? codeColours(code, language) : code));
  text.setAttribute("role", "region");
  text.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
  return element("div", { class: "listing" }, head, text);
}

function quote(lines, at, made, depth) {
  const inner = [];
  for (let found; at < lines.length && (found = QUOTE.exec(lines[at])); at++) inner.push(found[1]);
  made.append(element("blockquote", {}, blocks(inner, depth + 1)));
  return at;
}

function list(lines, at, made, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const whole = element(isOrdered ? "ol" : "ul");
  if (isOrdered && parseInt(mark) !== 1) whole.start = parseInt(mark);
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length > indent.length + 1 || found[1].length < indent.length || /\d/.test(found[2]) !== isOrdered || RULE.test(lines[at])) break;
    const width = indent.length + 2, inner = [found[3] ?? ""];
    for (at++; at < lines.length && belongs(lines, at, width); at++) inner.push(lines[at].slice(Math.min(width, leading(lines[at]))));
    const task = TASK.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(task[0].length);
    whole.append(element("li", task ? { class: "task" } : {}, ...(task ? [tick(task[1] !== " ")] : []), ...itemParts(inner, depth)));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
  }
  made.append(whole);
  return at;
}

const tick = isDone => element("input", { type: "checkbox", disabled: true, defaultChecked: isDone, aria: { label: isDone ? "Done" : "To do" } });

const leading = line => line.length - line.trimStart().length;

// Whether a line goes on with the list's item: indented, or the same paragraph.
function belongs(lines, at, width) {
  const line = lines[at];
  if (!line.trim()) return leading(lines[at + 1] ?? "") >= width && Boolean((lines[at + 1] ?? "").trim());
  if (leading(line) >= width) return true;
  return Boolean(lines[at - 1].trim()) && !startsBlock(line);
}

// A single paragraph of an item needs no <p>.
function itemParts(lines, depth) {
  const parts = blocks(lines, depth + 1);
  const [first] = parts.children;
  if (first?.tagName === "P" && ![...parts.children].slice(1).some(part => part.tagName === "P")) first.replaceWith(...first.childNodes);
  return [parts];
}

function table(lines, at, made) {
  const sides = cells(lines[at + 1]).map(cell => cell.endsWith(":") ? (cell.startsWith(":") ? "centre" : "right") : "");
  const row = (line, kind) => element("tr", {}, ...cells(line).slice(0, sides.length).map((cell, i) => element(kind, { class: sides[i] }, inline(cell))));
  const head = element("thead", {}, row(lines[at], "th")), body = element("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|") && lines[at].trim(); at++) body.append(row(lines[at], "td"));
  made.append(element("div", { class: "table", tabIndex: 0, role: "region", aria: { label: "Table" } }, element("table", {}, head, body)));
  return at;
}

const cells = line => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));

const startsBlock = line => [FENCE, HEADING, RULE, QUOTE, ITEM].some(kind => kind.test(line));

function paragraph(lines, at, made) {
  const whole = [lines[at].trim()];
  for (at++; at < lines.length && lines[at].trim() && !startsBlock(lines[at]) && !mathBlock(lines, at); at++) whole.push(lines[at].trim());
  made.append(element("p", {}, inline(whole.join("\n"))));
  return at;
}
