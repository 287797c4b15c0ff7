// The choice among models and adapters.

import { byId, element } from "./elements.js";

const CHOSEN = "quire-model";

// Says `change` when another model is chosen, and when more is known of it.
export class ModelChoice extends EventTarget {
  #select = byId("model");
  #cards = [];

  constructor(server) {
    super();
    this.server = server;
    this.#select.addEventListener("change", () => { sessionStorage.setItem(CHOSEN, this.name); this.#show(); });
    this.#select.addEventListener("focus", () => this.load().catch(() => {}));  // adapters come and go
  }

  get name() { return this.#select.value; }

  // Tokens that the model reads and writes altogether; 0 where that is not known.
  get contextLength() { return this.#card?.max_model_len ?? 0; }

  // Whether it sees images.
  get sees() { return Boolean(this.#card?.input_modalities?.includes("image")); }

  // What it makes of whole texts; undefined where that is nothing.
  get pooling() { return this.#card?.pooling; }

  get #card() { return this.#cards.find(card => card.id === this.name); }

  async load() {
    const { data } = await (await this.server.call("v1/models")).json();
    const chosen = this.name || sessionStorage.getItem(CHOSEN);
    this.#cards = data;
    const names = data.map(card => `${card.id} ${card.max_model_len}`).join("\n");
    if (names === this.#select.dataset.names) return;
    this.#select.dataset.names = names;
    const models = data.filter(card => !card.parent), adapters = data.filter(card => card.parent);
    this.#select.replaceChildren(...(adapters.length ? [group("Models", models), group("Adapters", adapters)] : models.map(option)));
    if (data.some(card => card.id === chosen)) this.#select.value = chosen;
    this.#show();
  }

  #show() {
    byId("welcome-model").textContent = shortName(this.name) || "the model";
    byId("welcome-length").textContent = this.contextLength ? `${this.contextLength.toLocaleString("en")} tokens of context` : "";
    this.#select.title = this.name;
    this.dispatchEvent(new Event("change"));
  }
}

// Of a path or hub id the last part.
export const shortName = name => name.replace(/\/+$/, "").split("/").pop();

const option = card => element("option", { value: card.id }, shortName(card.id));
const group = (label, cards) => element("optgroup", { label }, ...cards.map(option));
