// What is shown in the chat's place of a model that makes no answers: a text and others, and how well these fit; or a text and its labels.

import { byId, element } from "./elements.js";
import { problemOf } from "./problems.js";

const SCORING = ["score", "embed", "token_embed"];

export class TextsView {
  #asking = null;  // stops what is asked

  constructor(server, models) {
    Object.assign(this, { server, models });
    models.addEventListener("change", () => this.#show());
    byId("texts-form").addEventListener("submit", event => { event.preventDefault(); this.#ask(); });
  }

  get #tasks() { return this.models.pooling?.tasks ?? []; }
  get #scores() { return this.#tasks.some(task => SCORING.includes(task)); }

  #show() {
    const pooling = this.models.pooling, isShown = Boolean(pooling && !pooling.generates);
    document.documentElement.dataset.makes = isShown ? "texts" : "answers";
    if (!isShown) return;
    byId("view-chat").textContent = "Texts";
    byId("chat-title").textContent = "Texts";
    byId("texts-model").textContent = byId("welcome-model").textContent;
    byId("texts-about").textContent = about(pooling, this.models.contextLength);
    byId("texts-others").hidden = !this.#scores;
    byId("other-texts").required = this.#scores;
    byId("compare").textContent = this.#scores ? "Compare" : "Classify";
  }

  async #ask() {
    this.#asking?.abort();
    const own = this.#asking = new AbortController();
    byId("texts-problem").hidden = true;
    try {
      const lines = await (this.#scores ? this.#compared(own.signal) : this.#classified(own.signal));
      byId("scores").replaceChildren(...lines);
    } catch (error) {
      if (own.signal.aborted) return;
      byId("scores").replaceChildren();
      byId("texts-figures").textContent = "";
      byId("texts-problem").textContent = problemOf(error, this.server.key, true).problem;
      byId("texts-problem").hidden = false;
    }
  }

  // The other texts, the best first.
  async #compared(signal) {
    const documents = byId("other-texts").value.split("\n").map(line => line.trim()).filter(Boolean);
    const { results, usage } = await this.#post("rerank", { query: byId("first-text").value, documents }, signal);
    byId("texts-figures").textContent = `${documents.length} ${documents.length === 1 ? "text" : "texts"}, ${usage.total_tokens.toLocaleString("en")} tokens`;
    return lines(results.map(({ relevance_score, document }) => [relevance_score, document.text]));
  }

  // All labels, the likeliest first.
  async #classified(signal) {
    const { data: [{ probs }], usage } = await this.#post("classify", { input: byId("first-text").value }, signal);
    byId("texts-figures").textContent = `${usage.total_tokens.toLocaleString("en")} tokens`;
    const { labels } = this.models.pooling;
    return lines(probs.map((share, place) => [share, labels[place]]).sort(([one], [other]) => other - one));
  }

  async #post(path, fields, signal) {
    const body = JSON.stringify({ model: this.models.name, ...fields });
    return (await this.server.call(path, { method: "POST", body, signal })).json();
  }
}

function about({ tasks, dimension, similarity, labels }, length) {
  const parts = [tasks.join(", ")];
  if (dimension) parts.push(`${dimension.toLocaleString("en")} dimensions`);
  if (dimension && !tasks.includes("score")) parts.push(similarity);
  if (labels?.length > 1) parts.push(`${labels.length} labels`);
  if (length) parts.push(`texts of up to ${length.toLocaleString("en")} tokens`);
  return parts.join(" · ");
}

// A line for each score, with a bar; scores beyond 0 to 1 are drawn between the smallest and the largest.
function lines(scored) {
  const scores = scored.map(([score]) => score), least = Math.min(0, ...scores), most = Math.max(1, ...scores);
  return scored.map(([score, text]) => element("li", {},
    element("span", { class: "score" }, score.toFixed(4)),
    element("meter", { min: least, max: most, value: score, aria: { label: "Score" } }),
    element("span", { class: "words" }, text)));
}
