// Requests that run or wait, a row for each.

import { element } from "./elements.js";

export class RequestsView {
  #rows = new Map();  // by id
  #list = element("div", { class: "rows", role: "group" });
  #note = element("span", { class: "note" });
  #chosen = "";

  // `choose(id)` is called with the request whose row was chosen, or "". One that is optional is hidden while it is empty.
  constructor(title, choose, isOptional = false) {
    Object.assign(this, { choose, isOptional });
    this.#list.setAttribute("aria-label", `${title} requests`);
    this.node = element("section", { class: "card half", hidden: isOptional }, element("header", {}, element("h3", {}, title), this.#note), this.#list);
    this.empty = element("p", { class: "nobody" }, "None");
  }

  // `rows`: the columns of a frame; `all`: how many there are, of which a frame has the first ones.
  show(rows, all, now) {
    const { id: ids } = rows, shown = new Set(ids);
    for (const [id, row] of this.#rows) {
      if (shown.has(id)) continue;
      row.node.remove();
      this.#rows.delete(id);
      if (id === this.#chosen) this.#toggle(id);
    }
    ids.forEach((id, at) => {
      if (!this.#rows.has(id)) this.#rows.set(id, this.#make(id));
      const row = this.#rows.get(id);
      fill(row, { prompt: rows.prompt[at], known: rows.known[at], computed: rows.computed[at], limit: rows.limit[at], age: now - rows.arrival[at] });
      if (this.#list.children[at] !== row.node) this.#list.insertBefore(row.node, this.#list.children[at] ?? null);
    });
    if (!ids.length) this.#list.replaceChildren(this.empty);
    else this.empty.remove();
    this.node.hidden = this.isOptional && !ids.length;
    this.#note.textContent = all > ids.length ? `the first ${ids.length} of ${all}` : ids.length ? String(all) : "";
  }

  #make(id) {
    const prompt = element("i", { class: "prompt" }), output = element("i", { class: "output" });
    const bar = element("span", { class: "bar", aria: { hidden: "true" } }, prompt, output), how = element("span", { class: "how" });
    const node = element("button", { type: "button", class: "row", aria: { pressed: "false" } },
      element("span", { class: "who" }, id), bar, how);
    node.addEventListener("click", () => this.#toggle(id));
    return { node, prompt, output, how };
  }

  #toggle(id) {
    const before = this.#chosen;
    this.#chosen = id === before ? "" : id;
    for (const each of [before, this.#chosen]) this.#rows.get(each)?.node.setAttribute("aria-pressed", String(each === this.#chosen && each !== ""));
    this.choose(this.#chosen);
  }
}

function fill(row, { prompt, known, computed, limit, age }) {
  const share = tokens => `${Math.min(100, 100 * tokens / limit)}%`;
  const done = Math.min(computed, prompt), answered = Math.max(0, known - prompt);
  row.prompt.style.width = share(done);
  row.output.style.width = share(answered);
  row.how.textContent = answered ? `${answered} of ${limit - prompt}` : computed ? `prompt ${Math.round(100 * done / prompt)}%` : `${age.toFixed(1)} s`;
  row.node.title = `Prompt of ${prompt} tokens, ${done} computed; ${answered} tokens of at most ${limit - prompt} answered; came ${age.toFixed(1)} s ago`;
}
