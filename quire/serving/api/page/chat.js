// The conversation that is open: asking, stopping, asking again, and going to another one.

import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { makeRoom, sizeOf, usedTokens } from "./context.js";
import { Conversation } from "./conversation.js";
import { byId, element } from "./elements.js";
import { TurnsView } from "./turns_view.js";

const DRAW_MS = 50;  // a stream of many tokens is drawn no more often,
const SAVE_MS = 1000;  // and kept no more often
const OPEN = "quire-conversation";
const SUGGESTIONS = [
  "What is the capital of France?",
  "Sort these numbers: 7, 3, 5.",
  "Write a short story about a fox.",
  "Write a Python function that doubles a number.",
];

// Says `open` when another conversation is shown.
export class Chat extends EventTarget {
  conversation = new Conversation();
  #server; #models; #settings; #store; #showSetting; #turns; #composer;
  #running = new Map();  // by conversation: what ends its answer
  #deleted = new WeakSet();
  #said = byId("said");

  constructor({ server, models, settings, store, showSetting }) {
    super();
    this.#server = server;
    this.#models = models;
    this.#settings = settings;
    this.#store = store;
    this.#showSetting = showSetting;
    this.#turns = new TurnsView(this.#turnActions);
    this.#composer = new Composer(this.#composerActions);
    models.addEventListener("change", () => { this.#composer.measure(); this.#composer.fitModel(); });
    for (const button of document.querySelectorAll(".new-chat")) button.addEventListener("click", () => this.openNew());
    addEventListener("keydown", event => { if (event.key === "Escape") this.#stop(); });
    addEventListener("pagehide", () => this.#save(this.conversation));
    byId("suggestions").append(...SUGGESTIONS.map(text => element("li", {},
      element("button", { type: "button", on: { click: () => this.#ask(text) } }, text))));
    this.#draw();
    const id = sessionStorage.getItem(OPEN);
    if (id) this.open(id);
  }

  async open(id) {
    const running = [...this.#running.keys()].find(conversation => conversation.id === id);
    const conversation = running ?? await this.#store.get(id);
    if (conversation) this.#show(conversation);
  }

  openNew() {
    this.#show(new Conversation());
    this.#composer.focus();
  }

  async rename(id, title) {
    const conversation = this.conversation.id === id ? this.conversation : await this.#store.get(id);
    conversation.title = title;
    await this.#save(conversation);
  }

  async delete(id) {
    if (this.conversation.id === id) {
      this.#stop();
      this.#deleted.add(this.conversation);
      this.openNew();
    }
    await this.#store.delete(id);
  }

  get #turnActions() {
    return {
      branches: turn => this.conversation.branchesAt(turn),
      show: turn => { this.conversation.show(turn); this.#changed(); this.#turns.focusBranches(turn); },
      edit: (turn, text) => this.#ask(text, turn.images, this.conversation.parentOf(turn)),
      regenerate: turn => { if (this.#canAsk()) { this.#answer(this.conversation.parentOf(turn)); this.#composer.focus(); } },
      sendResults: turn => { if (this.#canAsk()) this.#answer(turn); },
      leaveOut: turn => this.#leaveOut(this.conversation.parentOf(turn)),
      askAnew: turn => { const { text, images } = this.conversation.parentOf(turn); this.openNew(); this.#ask(text, images); },
      hasOlder: turn => { const { parent, id } = this.conversation.parentOf(turn) ?? {}; return Boolean(parent) && id !== this.conversation.from; },
      sendAll: () => { this.conversation.from = null; this.#changed(); },
      resultChanged: () => this.#save(this.conversation),
      body: turn => ({ ...turn.answer.request, messages: this.conversation.messages(this.conversation.parentOf(turn), turn.answer.system) }),
      needsKey: () => Boolean(this.#server.key),
    };
  }

  get #composerActions() {
    const chat = this;
    return {
      ask: (text, images) => this.#ask(text, images),
      stop: () => this.#stop(),
      used: draft => usedTokens(this.conversation, draft),
      get limit() { return chat.#models.contextLength; },
      get sees() { return chat.#models.sees; },
      get hasWayOn() { return chat.conversation.from !== null || Boolean(chat.conversation.path.at(-1)?.answer?.isTooLong); },
      leaveOut: () => { makeRoom(this.conversation, this.conversation.path.at(-1), this.#models.contextLength, true); this.#changed(); },
      newChat: () => this.openNew(),
    };
  }

  #show(conversation) {
    this.conversation = conversation;
    sessionStorage.setItem(OPEN, conversation.id);
    this.#said.textContent = "";
    this.#draw();
    this.#turns.scrollToEnd();
    this.dispatchEvent(new Event("open"));
  }

  #draw() {
    this.#turns.draw(this.conversation);
    this.#composer.isRunning = this.#running.has(this.conversation);
    this.#composer.measure();
  }

  #changed() {
    this.#draw();
    this.#save(this.conversation);
  }

  async #save(conversation) {
    if (!conversation.isEmpty && !this.#deleted.has(conversation)) await this.#store.put(conversation);
  }

  #stop() { this.#running.get(this.conversation)?.abort(); }

  // Says whether it could be asked.
  #ask(text, images = [], behind = this.conversation.path.at(-1)) {
    if (!this.#canAsk()) return false;
    sessionStorage.setItem(OPEN, this.conversation.id);
    this.#answer(this.conversation.add({ text, ...(images.length && { images }) }, behind));
    return true;
  }

  #canAsk() {
    if (this.#running.has(this.conversation)) return false;
    const { wrong } = this.#settings;
    if (wrong) this.#showSetting(wrong);
    return !wrong;
  }

  #leaveOut(question) {
    if (!this.#canAsk()) return;
    makeRoom(this.conversation, question, this.#models.contextLength, true);
    this.#answer(question);
  }

  // Ask for an answer of the conversation up to this turn.
  async #answer(behind) {
    const { conversation } = this, { system } = this.#settings, { name: model } = this.#models;
    if (conversation.from !== null) makeRoom(conversation, behind, this.#models.contextLength, false);
    const messages = conversation.messages(behind, system), answer = new Answer(this.#request(behind, model), system, model);
    answer.sent = { from: conversation.from, characters: sizeOf(messages) };
    const turn = conversation.add({ answer }, behind), running = new AbortController();
    this.#running.set(conversation, running);
    this.#draw();
    this.#turns.scrollToEnd();
    this.#said.textContent = "Answering";
    this.#save(conversation);
    await answer.ask(this.#server, messages, running.signal, this.#following(conversation, turn));
    this.#running.delete(conversation);
    await this.#save(conversation);
    if (this.conversation !== conversation) return;
    this.#draw();
    this.#said.textContent = answer.problem ? "" : `Answer: ${answer.content || answer.calls.map(call => `calls ${call.name}`).join(", ")}`;
  }

  #request(behind, model) {
    const request = { ...(model && { model }), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
                      ...this.#settings.fields() };
    if (behind.answer && request.tool_choice === "required") request.tool_choice = "auto";  // it has called; now it may answer
    return request;
  }

  // Draws and keeps an answer soon, and draws it at once when it is whole.
  #following(conversation, turn) {
    let due = 0, saved = performance.now();
    const draw = () => {
      due = 0;
      if (this.conversation === conversation) { this.#turns.drawTurn(turn); this.#composer.measure(); }
      if (turn.answer.isOpen && performance.now() - saved > SAVE_MS) {
        saved = performance.now();
        this.#save(conversation);
      }
    };
    return () => {
      if (turn.answer.isOpen) due ||= setTimeout(draw, DRAW_MS);
      else { clearTimeout(due); draw(); }
    };
  }
}
