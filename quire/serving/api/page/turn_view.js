// A turn of the conversation as it is shown.

import { copyButton, element } from "./elements.js";
import { markdown } from "./markdown.js";
import { shortName } from "./models.js";
import { asCurl, asPython } from "./snippets.js";
import { tokensView } from "./tokens_view.js";

const REASONS = {
  stop: "", tool_calls: "", stopped: "stopped", length: "cut at its longest", repetition: "repeated itself", timeout: "out of time",
  abort: "ended by the server",
};

export function userTurn(text) {
  return element("article", { class: "turn user" }, element("h3", {}, "You"), element("div", { class: "words" }, text));
}

// `actions`: what buttons do: regenerate(), sendResults(), and needsKey().
export class AnswerView {
  #who = element("h3");
  #words = element("div", { class: "text" });
  #foot = element("div", { class: "foot" });
  #asTokens;
  #thinks = false;  // whether the reasoning is unfolded

  constructor(answer, actions) {
    this.answer = answer;
    this.actions = actions;
    this.#asTokens = Boolean(answer.body.logprobs && !answer.body.tools);
    this.node = element("article", { class: "turn assistant" }, this.#who, this.#words, this.#foot);
    this.draw();
  }

  draw() {
    const { answer } = this;
    this.#who.textContent = shortName(answer.model) || "The model";
    this.#words.replaceChildren(...this.#parts());
    this.#words.setAttribute("aria-busy", String(answer.isOpen));
    if (answer.isOpen) this.#foot.replaceChildren(figures(answer));
    else this.#foot.replaceChildren(figures(answer), ...this.#buttons());
  }

  #parts() {
    const { answer } = this, parts = [];
    if (answer.reasoning) parts.push(this.#thoughts());
    if (this.#asTokens) parts.push(tokensView(answer.tokens));
    else if (answer.content) parts.push(markdown(answer.content));
    if (answer.isOpen) parts.push(element("span", { class: "waiting" }));
    parts.push(...answer.calls.map(call => this.#call(call)));
    if (answer.problem) parts.push(element("p", { class: "error", role: "alert" }, answer.problem));
    return parts;
  }

  #thoughts() {
    const { answer } = this;
    const thoughts = element("details", { class: "thoughts", open: this.#thinks },
      element("summary", {}, answer.content || answer.calls.length || !answer.isOpen ? "Reasoning" : "Reasoning …"),
      element("div", {}, answer.reasoning.trim()));
    thoughts.addEventListener("toggle", () => { this.#thinks = thoughts.open; });
    return thoughts;
  }

  #call(call) {
    const box = element("div", { class: "call" },
      element("h4", {}, call.name, element("span", {}, "called")), element("pre", {}, pretty(call.arguments)));
    if (this.answer.isOpen || !call.id) return box;
    const field = element("textarea", { rows: 2, value: call.result ?? "", spellcheck: false, placeholder: '{"…": "…"}' });
    field.addEventListener("input", () => { call.result = field.value; });
    box.append(element("label", {}, "What it returned", field));
    return box;
  }

  #buttons() {
    const { answer, actions } = this, { body } = answer;
    const button = (label, action, more = {}) => element("button", { type: "button", class: "quiet", on: { click: action }, ...more }, label);
    return [
      answer.calls.length && button("Send results", actions.sendResults, { class: "primary results" }),
      answer.content && copyButton("Copy", () => answer.content),
      button(answer.problem ? "Try again" : "Regenerate", actions.regenerate, { class: "quiet regenerate" }),
      answer.tokens.length && button("Tokens", () => this.#toggleTokens(), { aria: { pressed: String(this.#asTokens) } }),
      copyButton("curl", () => asCurl(body, actions.needsKey())),
      copyButton("Python", () => asPython(body, actions.needsKey())),
    ].filter(Boolean);
  }

  #toggleTokens() {
    this.#asTokens = !this.#asTokens;
    this.draw();
    this.#foot.querySelector("[aria-pressed]").focus();
  }
}

// What it took, in one line.
function figures(answer) {
  const { usage, firstTokenS, tokensPerS } = answer;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const facts = [
    answer.isOpen && firstTokenS === null && "Waiting for the first token",
    firstTokenS !== null && `${firstTokenS < 10 ? Math.round(firstTokenS * 1000) + " ms" : firstTokenS.toFixed(1) + " s"} to the first token`,
    tokensPerS !== null && `${tokensPerS.toFixed(tokensPerS < 10 ? 1 : 0)} tokens/s`,
    usage && `${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""} + ${usage.completion_tokens} tokens`,
    !answer.isOpen && (REASONS[answer.finish] ?? answer.finish),
  ];
  return element("span", { class: "figures" }, facts.filter(Boolean).join(" · "));
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
