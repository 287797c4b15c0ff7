// The turns of a conversation, one below the other.

import { byId, element } from "./elements.js";
import { AnswerView, UserView } from "./turn_view.js";

const NEAR = 60;  // pixels from the end at which one is at the end

export class TurnsView {
  #list = byId("turns");
  #welcome = byId("welcome");
  #toEnd = byId("to-end");
  #views = new WeakMap();  // by turn

  // `actions`: as turn_view.js has them, and sendAll().
  constructor(actions) {
    this.actions = actions;
    this.#list.addEventListener("scroll", () => { this.#toEnd.hidden = this.#isAtEnd; });
    this.#toEnd.addEventListener("click", () => this.scrollToEnd());
  }

  draw(conversation) {
    const nodes = [];
    for (const turn of conversation.path) {
      if (turn.id === conversation.from) nodes.push(this.#divider());
      const view = this.#viewOf(turn);
      view.drawFoot();
      nodes.push(view.node);
    }
    this.#welcome.hidden = nodes.length > 0;
    nodes.unshift(this.#welcome);
    nodes.forEach((node, at) => { if (this.#list.children[at] !== node) this.#list.insertBefore(node, this.#list.children[at] ?? null); });
    while (this.#list.children.length > nodes.length) this.#list.lastElementChild.remove();
    this.#toEnd.hidden = this.#isAtEnd;
  }

  // One turn that has more to show; who reads its end goes on to do so.
  drawTurn(turn) {
    const isAtEnd = this.#isAtEnd;
    this.#viewOf(turn).draw();
    if (isAtEnd) this.scrollToEnd();
    else this.#toEnd.hidden = false;
  }

  scrollToEnd() { this.#list.scrollTop = this.#list.scrollHeight; }

  // Where one chooses among a turn's versions.
  focusBranches(turn) { this.#viewOf(turn).node.querySelector(".branches button:enabled")?.focus(); }

  get #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#list;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  #viewOf(turn) {
    if (!this.#views.has(turn)) this.#views.set(turn, turn.answer ? new AnswerView(turn, this.actions) : new UserView(turn, this.actions));
    return this.#views.get(turn);
  }

  #divider() {
    return element("div", { class: "divider" }, element("span", {}, "What is above is not sent any more: the context was full."),
      element("button", { type: "button", class: "quiet", on: { click: this.actions.sendAll } }, "Send all"));
  }
}
