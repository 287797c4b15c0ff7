// One answer of the model as it streams in: what it says, when it said it, and what that took.

import { problemOf } from "./problems.js";
import { ServerError, events } from "./server.js";

const MEASURED_MS = 100;  // what comes within less says nothing about speed
const KEPT = ["content", "reasoning", "calls", "tokens", "usage", "finish", "problem", "isTooLong", "request", "system", "model", "sent"];

export class Answer {
  content = "";
  reasoning = "";
  calls = [];  // each with id, name, arguments and, if the user gave one, a result
  tokens = [];  // with their log probabilities, if those were asked for
  usage = null;
  finish = "";  // why it ended
  problem = "";  // what went wrong, in words
  isTooLong = false;  // whether that was the length of the conversation
  sent = { from: null, characters: 0 };  // where the conversation began that was sent, and how long that was
  isOpen = true;
  firstTokenS = null;  // seconds until the first token
  tokensPerS = null;  // behind the first ones, where there is something to measure
  #began = performance.now();
  #first = 0;
  #counted = 0;  // tokens that had come with the first piece

  // `request` has the fields of what is asked, but for the messages; `system` is the prompt before these. `model` is ""
  // where the server chooses.
  constructor(request, system, model) {
    Object.assign(this, { request, system, model });
  }

  // An answer that was kept, also of another program: what is missing is empty.
  static read(plain) {
    const made = new Answer({}, "", "");
    for (const name of [...KEPT, "firstTokenS", "tokensPerS"]) if (plain[name] !== undefined) made[name] = plain[name];
    if (typeof made.content !== "string" || !Array.isArray(made.calls) || !Array.isArray(made.tokens)) throw new TypeError("An answer is broken.");
    if (plain.isOpen) made.finish = "interrupted";
    made.isOpen = false;
    return made;
  }

  get plain() {
    const { firstTokenS, tokensPerS, isOpen } = this;
    return { ...Object.fromEntries(KEPT.map(name => [name, this[name]])), firstTokenS, tokensPerS, isOpen };
  }

  // Ask, and read the stream to its end; `changed` is called after each piece.
  async ask(server, messages, signal, changed) {
    const body = JSON.stringify({ ...this.request, messages });
    try {
      const answer = await server.call("v1/chat/completions", { method: "POST", body, signal });
      await this.#read(answer, changed);
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped";
      else Object.assign(this, problemOf(error, server.key));
    }
    this.isOpen = false;
    changed();
  }

  async #read(answer, changed) {
    for await (const { data } of events(answer)) {
      if (data === "[DONE]") return;
      this.#add(JSON.parse(data));
      changed();
    }
    throw new TypeError("cut off");
  }

  get isEmpty() { return !this.content && !this.reasoning && !this.calls.length; }

  get numTokens() { return this.usage?.completion_tokens ?? 0; }

  // What stands in the conversation, as messages of the next request.
  get messages() {
    const message = { role: "assistant", content: this.content };
    if (!this.calls.length) return this.content ? [message] : [];
    message.tool_calls = this.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    return [message, ...this.calls.map(call => ({ role: "tool", tool_call_id: call.id, content: call.result ?? "" }))];
  }

  #add(chunk) {
    if (chunk.error) throw new ServerError(chunk.error, Number(chunk.error.code) || 500);
    this.model ||= chunk.model || "";
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    const { delta } = choice;
    this.content += delta.content || "";
    this.reasoning += delta.reasoning || "";
    for (const part of delta.tool_calls || []) this.#addCall(part);
    this.tokens.push(...choice.logprobs?.content || []);
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (!(delta.content || delta.reasoning || delta.tool_calls)) return;
    this.#measure(performance.now());
  }

  #measure(now) {
    if (!this.#first) {
      this.#first = now;
      this.#counted = this.numTokens || 1;
      this.firstTokenS = (now - this.#began) / 1000;
    }
    const ms = now - this.#first, more = this.numTokens - this.#counted;
    this.tokensPerS = ms >= MEASURED_MS && more > 0 ? 1000 * more / ms : null;
  }

  #addCall({ index, id, function: part }) {
    const call = this.calls[index] ??= { id: "", name: "", arguments: "" };
    call.id ||= id || "";
    call.name += part?.name || "";
    call.arguments += part?.arguments || "";
  }
}
