// A conversation: a tree of turns. Asking again and editing add a branch, so no turn is lost; one branch is shown.

import { Answer } from "./answer.js";
import { contentOf, isImage, questionOf } from "./images.js";

const TITLE_LENGTH = 60;

export class Conversation {
  id = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;  // without TLS there is no randomUUID
  title = "";
  changed = Date.now();
  from = null;  // the first turn that is sent, where older ones are left out
  #turns = new Map();  // by id, parents before their children
  #shown = new Map();  // of each turn, and null: the child that is shown

  get isEmpty() { return this.#turns.size === 0; }

  // The turns that are shown, from the first to the last.
  get path() {
    const path = [];
    for (let turn = this.#child(null); turn; turn = this.#child(turn.id)) path.push(turn);
    return path;
  }

  // Add a turn of the user ({text}, and {images} if there are any) or of the model ({answer}) behind another one, or at the beginning.
  add(said, behind = null) {
    let number = this.#turns.size + 1;
    while (this.#turns.has(String(number))) number++;  // files that were imported number as they like
    const turn = { id: String(number), parent: behind?.id ?? null, ...said };
    this.#turns.set(turn.id, turn);
    this.#shown.set(turn.parent, turn.id);
    if (!this.title && !turn.answer) this.title = shortened(turn.text || turn.images?.[0]?.name || "");
    this.changed = Date.now();
    return turn;
  }

  parentOf(turn) { return this.#turns.get(turn.parent) ?? null; }

  // All that was said at a turn's place.
  branchesAt(turn) { return [...this.#turns.values()].filter(other => other.parent === turn.parent); }

  show(turn) {
    this.#shown.set(turn.parent, turn.id);
  }

  // Messages up to and with a turn, as a request has them.
  messages(last, system) {
    const turns = [];
    for (let turn = last; turn; turn = this.parentOf(turn)) {
      turns.unshift(turn);
      if (turn.id === this.from) break;
    }
    const said = turns.flatMap((turn, at) => {
      if (turn.answer) return turn.answer.messages;
      const wasLost = turns[at + 1]?.answer.messages.length === 0;  // nothing came back for it
      return wasLost ? [] : [{ role: "user", content: contentOf(turn) }];
    });
    return [...(system ? [{ role: "system", content: system }] : []), ...said];
  }

  // As JSON has it; `read` makes a conversation of that again.
  get plain() {
    const turns = [...this.#turns.values()].map(({ id, parent, text, images, answer }) =>
      ({ id, parent, ...(answer ? { answer: answer.plain } : { text, ...(images && { images }) }) }));
    return { id: this.id, title: this.title, changed: this.changed, from: this.from, turns, shown: [...this.#shown] };
  }

  // Raises a TypeError where something is no conversation.
  static read(plain) {
    const made = new Conversation(), { id, title, changed, from, turns, shown } = plain;
    if (!Array.isArray(turns) || !Array.isArray(shown)) throw new TypeError("This is no conversation.");
    for (const turn of turns) {
      const isKnown = turn.parent === null || made.#turns.has(turn.parent);
      if (!isKnown || made.#turns.has(turn.id) || !(turn.answer || typeof turn.text === "string")) throw new TypeError("A turn is broken.");
      const images = Array.isArray(turn.images) && { images: turn.images.filter(isImage) };
      const said = turn.answer ? { answer: Answer.read(turn.answer) } : { text: turn.text, ...images };
      made.#turns.set(turn.id, { id: turn.id, parent: turn.parent, ...said });
    }
    for (const [parent, child] of shown) if (made.#turns.get(child)?.parent === parent) made.#shown.set(parent, child);
    return Object.assign(made, { id: String(id), title: String(title), changed: Number(changed) || Date.now(), from: made.#turns.has(from) ? from : null });
  }

  // A conversation of the messages of a request, as other programs keep them.
  static ofMessages(messages) {
    const made = new Conversation();
    let last = null;
    for (const { role, content } of messages) {
      const question = questionOf(content);
      if (!question || !["user", "assistant"].includes(role)) continue;
      last = made.add(role === "user" ? question : { answer: Answer.read({ content: question.text }) }, last);
    }
    if (!last) throw new TypeError("There is no message in it.");
    return made;
  }

  #child(id) { return this.#turns.get(this.#shown.get(id)); }
}

function shortened(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH).trimEnd()} …` : line;
}
