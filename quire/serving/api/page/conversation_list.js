// The list of conversations beside the chat: choosing, finding, naming, deleting, and files of them.

import { byId, element } from "./elements.js";

const UNDO_MS = 10_000;

export class ConversationList {
  #list = byId("conversations");
  #note = byId("conversations-note");
  #find = byId("find-conversation");
  #file = byId("import-file");
  #said = null;
  #drawing = 0;

  // `chat` opens conversations and says `open` when it shows another one.
  constructor(store, chat) {
    this.store = store;
    this.chat = chat;
    for (const source of [store, chat]) source.addEventListener(source === store ? "change" : "open", () => this.#draw());
    this.#find.addEventListener("input", () => this.#draw());
    byId("export-all").addEventListener("click", async () => download("quire-conversations.json", await store.exported()));
    byId("import").addEventListener("click", () => this.#file.click());
    this.#file.addEventListener("change", () => this.#import());
    this.#draw();
  }

  async #draw() {
    const drawing = ++this.#drawing, all = await this.store.all(), isKept = await this.store.isKept;
    if (drawing !== this.#drawing || this.#list.querySelector("input")) return;  // a newer one draws, or a title is written
    const wanted = this.#find.value.trim().toLowerCase();
    const found = all.filter(({ title }) => title.toLowerCase().includes(wanted));
    const focused = document.activeElement?.dataset.id;
    this.#list.replaceChildren(...found.map(plain => this.#item(plain)));
    if (focused) this.#list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
    this.#find.parentElement.hidden = all.length < 6 && !wanted;
    byId("export-all").disabled = !all.length;
    if (this.#said) return;
    this.#note.textContent = !isKept ? "This browser keeps no more: what you write is gone with this tab. Export what you need, and delete some."
      : found.length ? "" : wanted ? "None has these words in its title." : "None yet. What you write is kept in this browser.";
  }

  #item({ id, title }) {
    const isOpen = id === this.chat.conversation.id;
    const choose = element("button", { type: "button", class: "title", data: { id }, on: { click: () => this.chat.open(id) } }, title || "Untitled");
    choose.title = title;
    if (isOpen) choose.setAttribute("aria-current", "true");
    return element("li", {}, choose, ...(isOpen ? [this.#buttons(id, title)] : []));
  }

  #buttons(id, title) {
    const button = (label, action) => element("button", { type: "button", class: "quiet", on: { click: action } }, label);
    return element("div", { class: "item-buttons" },
      button("Rename", event => this.#rename(event.target.closest("li"), id, title)),
      button("Export", async () => download(`${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation"}.json`, await this.store.exported(id))),
      button("Delete", () => this.#delete(id, title)));
  }

  #rename(item, id, title) {
    const field = element("input", { value: title, aria: { label: "Title" }, maxLength: 200 });
    let isOver = false;
    const end = async isMeant => {
      if (isOver) return;
      isOver = true;
      field.remove();
      if (isMeant && field.value.trim()) await this.chat.rename(id, field.value.trim());
      await this.#draw();
      this.#list.querySelector("[aria-current]")?.focus();
    };
    field.addEventListener("keydown", event => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.select();
  }

  async #delete(id, title) {
    const lost = await this.store.get(id);
    await this.chat.delete(id);
    const undo = element("button", { type: "button", class: "quiet", on: { click: async () => {
      await this.store.put(lost);
      this.#say("");
      await this.chat.open(id);
    } } }, "Undo");
    this.#say(`Deleted “${title}”.`, undo);
    undo.focus();
  }

  async #import() {
    try {
      let count = 0;
      for (const file of this.#file.files) count += await this.store.import(await file.text());
      this.#say(`${count} ${count === 1 ? "conversation" : "conversations"} imported.`);
    } catch {
      this.#say("This file has no conversations: it is neither an export of this page nor a list of messages.");
    }
    this.#file.value = "";
  }

  #say(text, ...more) {
    clearTimeout(this.#said);
    this.#note.replaceChildren(text, " ", ...more);
    this.#said = text ? setTimeout(() => { this.#said = null; this.#draw(); }, UNDO_MS) : null;
  }
}

function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
