// Where one writes, and beside it how full the context is.

import { byId, element } from "./elements.js";
import { readImage, thumbnail } from "./images.js";

const NEARLY = 0.8, FULL = 0.95;  // shares of the context from which it is said
const BLIND = "This model reads text alone. Choose one that sees images, or leave them out.";

export class Composer {
  #text = byId("text");
  #send = byId("send");
  #gauge = byId("gauge");
  #notice = byId("notice");
  #attach = byId("attach");
  #file = byId("attach-file");
  #attached = byId("attached");
  #problem = byId("attach-problem");
  #isRunning = false;
  #images = [];

  // `actions`: ask(text, images), which says whether it could be asked; stop(); used(draft) and limit, in tokens; sees, whether
  // the model sees images; hasWayOn, whether the conversation shows itself how it goes on when the context is full;
  // leaveOut() and newChat().
  constructor(actions) {
    this.actions = actions;
    byId("composer").addEventListener("submit", event => { event.preventDefault(); this.#submit(); });
    this.#text.addEventListener("input", () => { this.#fit(); this.measure(); });
    this.#text.addEventListener("keydown", event => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#isRunning) this.#submit();
    });
    this.#attach.addEventListener("click", () => this.#file.click());
    this.#file.addEventListener("change", () => { this.#take([...this.#file.files]); this.#file.value = ""; });
    this.#text.addEventListener("paste", event => this.#takeFrom(event, event.clipboardData));
    const chat = byId("chat");
    chat.addEventListener("dragover", event => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
    chat.addEventListener("drop", event => this.#takeFrom(event, event.dataTransfer));
  }

  set isRunning(isRunning) {
    this.#isRunning = isRunning;
    this.#send.textContent = isRunning ? "Stop" : "Send";
  }

  focus() { this.#text.focus(); }

  // Show whether the model that is chosen sees images.
  fitModel() {
    this.#attach.hidden = !this.actions.sees;
    if (this.actions.sees) this.#say("");
    else if (this.#images.length) this.#say(BLIND);
  }

  // Show how full the context is.
  measure() {
    const { limit } = this.actions, used = this.actions.used(this.#text.value), share = limit ? used / limit : 0;
    this.#gauge.hidden = !limit;
    this.#gauge.dataset.state = share >= FULL ? "full" : share >= NEARLY ? "nearly" : "";
    this.#gauge.querySelector("i").style.width = `${Math.min(100, 100 * share)}%`;
    this.#gauge.querySelector("span").textContent = `${used.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens`;
    for (const [name, value] of [["valuemax", limit], ["valuenow", Math.min(used, limit)]]) this.#gauge.setAttribute(`aria-${name}`, value);
    this.#tell(share >= FULL && !this.actions.hasWayOn);
  }

  #tell(isFull) {
    if (this.#notice.hidden === !isFull) return;
    this.#notice.hidden = !isFull;
    const button = (label, action) => element("button", { type: "button", class: "quiet", on: { click: action } }, label);
    this.#notice.replaceChildren(...(isFull ? ["The context is nearly full. ", button("Leave out the oldest turns", this.actions.leaveOut), button("New chat", this.actions.newChat)] : []));
  }

  #takeFrom(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.#take([...files]);
  }

  async #take(files) {
    if (!this.actions.sees) return this.#say(BLIND);
    this.#say("");
    for (const file of files) {
      try {
        this.#images.push(await readImage(file));
      } catch (error) {
        this.#say(error.message);
      }
    }
    this.#drawImages();
  }

  #drawImages() {
    this.#attached.hidden = !this.#images.length;
    this.#attached.replaceChildren(...this.#images.map(image => element("li", {}, thumbnail(image),
      element("button", { type: "button", class: "quiet", aria: { label: `Remove ${image.name}` }, on: { click: () => {
        this.#images = this.#images.filter(other => other !== image);
        this.#drawImages();
        this.#text.focus();
      } } }, "×"))));
  }

  #say(problem) {
    this.#problem.textContent = problem;
    this.#problem.hidden = !problem;
  }

  #submit() {
    if (this.#isRunning) return this.actions.stop();
    const text = this.#text.value.trim();
    if (this.#images.length && !this.actions.sees) return this.#say(BLIND);
    if (!(text || this.#images.length) || !this.actions.ask(text, this.#images)) return;
    this.#text.value = "";
    this.#images = [];
    this.#drawImages();
    this.#say("");
    this.#fit();
    this.measure();
  }

  #fit() {
    this.#text.style.height = "auto";
    this.#text.style.height = `${this.#text.scrollHeight}px`;
  }
}
