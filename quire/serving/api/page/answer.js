// One answer of the model as it streams in: what it says, when it said it, and what that took.

import { events } from "./server.js";

export class Answer {
  content = "";
  reasoning = "";
  calls = [];  // each with id, name, arguments and, if the user gave one, a result
  tokens = [];  // with their log probabilities, if those were asked for
  usage = null;
  finish = "";  // why it ended
  problem = "";
  isOpen = true;
  #began = performance.now();
  #first = 0;
  #last = 0;
  #counted = 0;  // tokens that had come with the first piece

  // The body is what was asked; kept, so that it can be shown as a command. `model` is "" where the server chooses.
  constructor(body, model) {
    this.body = body;
    this.model = model;
  }

  // Read the stream to its end; `changed` is called after each piece.
  async read(server, signal, changed) {
    try {
      const answer = await server.call("v1/chat/completions", { method: "POST", body: JSON.stringify(this.body), signal });
      for await (const { data } of events(answer)) {
        if (data === "[DONE]") break;
        this.#add(JSON.parse(data));
        changed();
      }
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped";
      else this.problem = error.message + (error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "");
    }
    this.isOpen = false;
    changed();
  }

  get isEmpty() { return !this.content && !this.reasoning && !this.calls.length; }

  // Seconds until the first token, or null before it.
  get firstTokenS() { return this.#first ? (this.#first - this.#began) / 1000 : null; }

  get numTokens() { return this.usage?.completion_tokens ?? 0; }

  // Tokens a second behind the first ones, or null where nothing can be said yet.
  get tokensPerS() {
    const seconds = (this.#last - this.#first) / 1000, more = this.numTokens - this.#counted;
    return seconds > 0 && more > 0 ? more / seconds : null;
  }

  // What stands in the conversation, as messages of the next request.
  get messages() {
    const message = { role: "assistant", content: this.content };
    if (!this.calls.length) return this.content ? [message] : [];
    message.tool_calls = this.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    return [message, ...this.calls.map(call => ({ role: "tool", tool_call_id: call.id, content: call.result ?? "" }))];
  }

  #add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
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
    this.#last = performance.now();
    if (!this.#first) {
      this.#first = this.#last;
      this.#counted = this.numTokens || 1;
    }
  }

  #addCall({ index, id, function: part }) {
    const call = this.calls[index] ??= { id: "", name: "", arguments: "" };
    call.id ||= id || "";
    call.name += part?.name || "";
    call.arguments += part?.arguments || "";
  }
}
