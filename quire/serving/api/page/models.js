// The choice among models and adapters.

import { byId, element } from "./elements.js";

const CHOSEN = "quire-model";

export class ModelChoice {
  #select = byId("model");

  constructor(server) {
    this.server = server;
    this.#select.addEventListener("change", () => { sessionStorage.setItem(CHOSEN, this.name); this.#show(); });
    this.#select.addEventListener("focus", () => this.load().catch(() => {}));  // adapters come and go
  }

  get name() { return this.#select.value; }

  async load() {
    const { data } = await (await this.server.call("v1/models")).json();
    const chosen = this.name || sessionStorage.getItem(CHOSEN);
    const names = data.map(card => card.id).join("\n");
    if (names === this.#select.dataset.names) return;
    this.#select.dataset.names = names;
    const models = data.filter(card => !card.parent), adapters = data.filter(card => card.parent);
    this.#select.replaceChildren(...(adapters.length ? [group("Models", models), group("Adapters", adapters)] : models.map(option)));
    if (data.some(card => card.id === chosen)) this.#select.value = chosen;
    this.#show();
  }

  #show() {
    byId("welcome-model").textContent = shortName(this.name) || "the model";
    this.#select.title = this.name;
  }
}

// Of a path or hub id the last part.
export const shortName = name => name.replace(/\/+$/, "").split("/").pop();

const option = card => element("option", { value: card.id }, shortName(card.id));
const group = (label, cards) => element("optgroup", { label }, ...cards.map(option));
