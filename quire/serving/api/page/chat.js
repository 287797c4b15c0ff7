// The conversation: asking, stopping, asking again.

import { Answer } from "./answer.js";
import { byId, element } from "./elements.js";
import { AnswerView, userTurn } from "./turn_view.js";

const DRAW_MS = 50;  // a stream of many tokens is drawn no more often
const SUGGESTIONS = [
  "What is the capital of France?",
  "Sort these numbers: 7, 3, 5.",
  "Write a short story about a fox.",
  "Write a Python function that doubles a number.",
];

export class Chat {
  #server; #models; #settings;
  #turns = [];  // texts of the user, and answers
  #running = null;
  #list = byId("turns");
  #text = byId("text");
  #send = byId("send");
  #said = byId("said");
  #welcome = byId("welcome");

  constructor(server, models, settings, showSetting) {
    Object.assign(this, { showSetting });
    this.#server = server;
    this.#models = models;
    this.#settings = settings;
    byId("composer").addEventListener("submit", event => { event.preventDefault(); this.#submit(); });
    byId("new-chat").addEventListener("click", () => this.#clear());
    this.#text.addEventListener("input", () => this.#fit());
    this.#text.addEventListener("keydown", event => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running) this.#submit();
    });
    addEventListener("keydown", event => { if (event.key === "Escape") this.#running?.abort(); });
    byId("suggestions").append(...SUGGESTIONS.map(text => element("li", {},
      element("button", { type: "button", on: { click: () => this.#ask(text) } }, text))));
  }

  #submit() {
    if (this.#running) return this.#running.abort();
    const text = this.#text.value.trim();
    if (text && this.#ask(text)) { this.#text.value = ""; this.#fit(); }
  }

  // Says whether it could be asked.
  #ask(text) {
    if (this.#running || !this.#canAsk()) return false;
    this.#turns.push({ text });
    this.#welcome.hidden = true;
    this.#list.append(userTurn(text));
    this.#answer();
    return true;
  }

  #canAsk() {
    const { wrong } = this.#settings;
    if (!wrong) return true;
    this.showSetting(wrong);
    return false;
  }

  get #messages() {
    const { system } = this.#settings;
    const said = this.#turns.flatMap((turn, at) => {
      if (turn.answer) return turn.answer.messages;
      const wasLost = this.#turns[at + 1]?.answer?.messages.length === 0;  // nothing came back for it
      return wasLost ? [] : [{ role: "user", content: turn.text }];
    });
    return [...(system ? [{ role: "system", content: system }] : []), ...said];
  }

  async #answer() {
    const turns = this.#turns, model = this.#models.name;
    const body = { ...(model && { model }), messages: this.#messages, stream: true,
                   stream_options: { include_usage: true, continuous_usage_stats: true }, ...this.#settings.fields() };
    const answer = new Answer(body, model), running = this.#running = new AbortController();
    const view = new AnswerView(answer, {
      regenerate: () => this.#again(answer),
      sendResults: () => { if (!this.#running && this.#canAsk()) { this.#keepOnly(answer); this.#answer(); } },
      needsKey: () => Boolean(this.#server.key),
    });
    turns.push({ answer, view });
    this.#list.append(view.node);
    this.#list.scrollTop = this.#list.scrollHeight;
    this.#send.textContent = "Stop";
    this.#said.textContent = "Answering";
    await answer.read(this.#server, running.signal, this.#drawing(view));
    if (this.#running !== running) return;  // "New chat" came in between
    this.#running = null;
    this.#send.textContent = "Send";
    this.#said.textContent = answer.problem ? "" : `Answer: ${answer.content || answer.calls.map(call => `calls ${call.name}`).join(", ")}`;
  }

  // Draws a view soon, and at once when the answer is whole; stays at the end if it was there.
  #drawing(view) {
    let due = 0;
    const draw = () => {
      due = 0;
      const list = this.#list, atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
      view.draw();
      if (atEnd) list.scrollTop = list.scrollHeight;
    };
    return () => {
      if (view.answer.isOpen) due ||= setTimeout(draw, DRAW_MS);
      else { clearTimeout(due); draw(); }
    };
  }

  // The same again: the answer and all behind it go.
  #again(answer) {
    if (this.#running || !this.#canAsk()) return;
    this.#keepOnly(answer);
    this.#turns.pop().view.node.remove();
    this.#answer();
    this.#text.focus();
  }

  // What came behind an answer is no part of the conversation any more.
  #keepOnly(answer) {
    const at = this.#turns.findIndex(turn => turn.answer === answer);
    this.#turns.length = at + 1;
    while (this.#list.lastElementChild !== this.#turns[at].view.node) this.#list.lastElementChild.remove();
  }

  #clear() {
    this.#running?.abort();
    this.#running = null;
    this.#turns = [];
    this.#list.replaceChildren(this.#welcome);
    this.#welcome.hidden = false;
    this.#send.textContent = "Send";
    this.#said.textContent = "";
    this.#text.focus();
  }

  #fit() {
    this.#text.style.height = "auto";
    this.#text.style.height = `${this.#text.scrollHeight}px`;
  }
}
