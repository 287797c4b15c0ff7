// A turn of the conversation as it is shown.

import { copyButton, element } from "./elements.js";
import { thumbnail } from "./images.js";
import { markdown } from "./markdown.js";
import { shortName } from "./models.js";
import { patch } from "./patch.js";
import { asCurl, asPython } from "./snippets.js";
import { tokensView } from "./tokens_view.js";

const REASONS = {
  stop: "", tool_calls: "", stopped: "stopped", length: "cut at max tokens", repetition: "repeated itself", timeout: "out of time",
  abort: "ended by the server", interrupted: "cut off: the page was closed",
};

const button = (label, action, more = {}) => element("button", { type: "button", class: "quiet", on: { click: action }, ...more }, label);

// The choice among all that was said at a turn's place; nothing where there is one.
function branches(turn, { branches: all, show }) {
  const turns = all(turn), at = turns.indexOf(turn);
  if (turns.length < 2) return [];
  const step = (sign, words, to) => button(sign, () => show(turns[to]), { disabled: !turns[to], aria: { label: words } });
  return [element("span", { class: "branches", role: "group", aria: { label: `Version ${at + 1} of ${turns.length}` } },
    step("‹", "Earlier version", at - 1), `${at + 1}/${turns.length}`, step("›", "Later version", at + 1))];
}

// `actions`: what buttons do: show(turn), edit(turn, text), regenerate(turn), sendResults(turn), leaveOut(turn),
// askAnew(turn), resultChanged(); and what they ask: branches(turn), hasOlder(turn), body(turn), needsKey().
export class UserView {
  #words = element("div", { class: "words" });
  #foot = element("div", { class: "foot" });

  constructor(turn, actions) {
    Object.assign(this, { turn, actions });
    if (turn.images) this.#words.append(element("div", { class: "seen" }, ...turn.images.map(thumbnail)));
    this.#words.append(turn.text);
    this.node = element("article", { class: "turn user" }, element("h3", {}, "You"), this.#words, this.#foot);
  }

  drawFoot() {
    const { turn } = this;
    this.#foot.replaceChildren(...branches(turn, this.actions), button("Edit", () => this.#edit()), copyButton("Copy", () => turn.text));
  }

  #edit() {
    const field = element("textarea", { value: this.turn.text, rows: Math.min(12, this.turn.text.split("\n").length + 1), aria: { label: "Your message" } });
    const close = () => { form.replaceWith(this.#words); this.#foot.hidden = false; };
    const form = element("form", { class: "editor" }, field,
      element("div", {}, button("Cancel", close), element("button", { type: "submit", class: "primary" }, "Send")));
    form.addEventListener("submit", event => {
      event.preventDefault();
      const text = field.value.trim();
      if ((text || this.turn.images) && this.actions.edit(this.turn, text)) close();
    });
    field.addEventListener("keydown", event => {
      if (event.key === "Escape") { event.stopPropagation(); close(); this.#foot.querySelector("button:last-of-type")?.focus(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    });
    this.#words.replaceWith(form);
    this.#foot.hidden = true;
    field.focus();
  }
}

export class AnswerView {
  #who = element("h3");
  #thoughts = element("details", { class: "thoughts", hidden: true }, element("summary"), element("div"));
  #text = element("div", { class: "text" });
  #rest = element("div", { class: "rest" });
  #foot = element("div", { class: "foot" });
  #asTokens;

  constructor(turn, actions) {
    Object.assign(this, { turn, actions, answer: turn.answer });
    const { logprobs, tools } = this.answer.request;
    this.#asTokens = Boolean(logprobs && !tools);
    this.node = element("article", { class: "turn assistant" }, this.#who, this.#thoughts, this.#text, this.#rest, this.#foot);
    this.draw();
  }

  draw() {
    const { answer } = this;
    this.#who.textContent = shortName(answer.model) || "The model";
    this.#drawThoughts();
    this.#text.hidden = !(answer.content || this.#asTokens);
    this.#text.setAttribute("aria-busy", String(answer.isOpen));
    if (this.#asTokens) this.#text.replaceChildren(tokensView(answer.tokens));
    else patch(this.#text, markdown(answer.content));
    this.#rest.replaceChildren(...this.#others());
    this.drawFoot();
  }

  drawFoot() {
    const { answer } = this;
    if (answer.isOpen) this.#foot.replaceChildren(figures(answer));
    else this.#foot.replaceChildren(figures(answer), ...branches(this.turn, this.actions), ...this.#buttons());
  }

  #drawThoughts() {
    const { answer } = this, [summary, words] = this.#thoughts.children;
    this.#thoughts.hidden = !answer.reasoning;
    summary.textContent = answer.content || answer.calls.length || !answer.isOpen ? "Reasoning" : "Reasoning …";
    patch(words, element("div", {}, answer.reasoning.trim()));
  }

  #others() {
    const { answer } = this;
    return [
      answer.isOpen && element("span", { class: "waiting" }),
      ...answer.calls.map(call => this.#call(call)),
      answer.problem && element("div", { class: "error", role: "alert" }, element("p", {}, answer.problem), ...this.#waysOn()),
    ].filter(Boolean);
  }

  // Where the conversation is too long for the model.
  #waysOn() {
    const { turn, actions } = this;
    if (!this.answer.isTooLong) return [];
    return [element("div", { class: "ways" },
      ...(actions.hasOlder(turn) ? [button("Leave out the oldest turns", () => actions.leaveOut(turn), { class: "primary" })] : []),
      button("Ask in a new chat", () => actions.askAnew(turn)))];
  }

  #call(call) {
    const box = element("div", { class: "call" },
      element("h4", {}, call.name, element("span", {}, "called")), element("pre", {}, pretty(call.arguments)));
    if (this.answer.isOpen || !call.id) return box;
    const field = element("textarea", { rows: 2, value: call.result ?? "", spellcheck: false, placeholder: '{"…": "…"}', required: true });
    field.addEventListener("input", () => { call.result = field.value; });
    field.addEventListener("change", () => this.actions.resultChanged());
    box.append(element("label", {}, "What it returned", field));
    return box;
  }

  #sendResults() {
    const empty = [...this.#rest.querySelectorAll(".call textarea")].find(field => !field.checkValidity());
    if (empty) empty.reportValidity();
    else this.actions.sendResults(this.turn);
  }

  #buttons() {
    const { answer, actions, turn } = this;
    return [
      answer.calls.length && button("Send results", () => this.#sendResults(), { class: "primary results" }),
      answer.content && copyButton("Copy", () => answer.content),
      button(answer.problem ? "Try again" : "Regenerate", () => actions.regenerate(turn), { class: "quiet regenerate" }),
      answer.tokens.length && button("Tokens", () => this.#toggleTokens(), { aria: { pressed: String(this.#asTokens) } }),
      copyButton("curl", () => asCurl(actions.body(turn), actions.needsKey())),
      copyButton("Python", () => asPython(actions.body(turn), actions.needsKey())),
    ].filter(Boolean);
  }

  #toggleTokens() {
    this.#asTokens = !this.#asTokens;
    this.draw();
    this.#foot.querySelector("[aria-pressed]").focus();
  }
}

// What it took, in one line.
function figures({ usage, firstTokenS, tokensPerS, isOpen, finish }) {
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const facts = [
    isOpen && firstTokenS === null && "Waiting for the first token",
    firstTokenS !== null && `${firstTokenS < 10 ? Math.round(firstTokenS * 1000) + " ms" : firstTokenS.toFixed(1) + " s"} to the first token`,
    tokensPerS !== null && `${tokensPerS.toFixed(tokensPerS < 10 ? 1 : 0)} tokens/s`,
    usage && `${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""} + ${usage.completion_tokens} tokens`,
    !isOpen && (REASONS[finish] ?? finish),
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
