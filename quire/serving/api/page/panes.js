// Which panes are shown: chat, engine or both, and at their side the conversations or the settings.

import { byId } from "./elements.js";

const VIEW = "quire-view", SIDE = "quire-side";
const NARROW = matchMedia("(max-width: 860px)");
const OVERLAID = matchMedia("(max-width: 1080px)");  // what is at the side lies over the rest
const ROOMY = matchMedia("(min-width: 1360px)");
const SIDES = ["chats", "settings"];

export class Panes {
  #side = "";  // what is at the side
  #root = document.documentElement;

  constructor() {
    byId("view").addEventListener("change", event => this.#show(event.target.value));
    NARROW.addEventListener("change", () => this.#show(this.#wanted));
    this.#show(this.#wanted);
    for (const side of SIDES) {
      const toggle = byId(`toggle-${side}`), pane = byId(side);
      toggle.addEventListener("click", () => this.#choose(this.#side === side ? "" : side));
      byId(`close-${side}`).addEventListener("click", () => { this.#choose(""); toggle.focus(); });
      pane.addEventListener("keydown", event => {
        if (event.key === "Escape" && OVERLAID.matches) { this.#open(""); toggle.focus(); }
      });
    }
    OVERLAID.addEventListener("change", () => this.#open(this.#side));
    this.#open(OVERLAID.matches ? "" : localStorage.getItem(SIDE) ?? (ROOMY.matches ? "chats" : ""));
  }

  get hasEngine() { return this.#root.dataset.engine !== "no"; }

  // A field of the settings, with the focus.
  showSetting(field) {
    this.#open("settings");
    field.focus();
    field.reportValidity();
  }

  closeOverlay() { if (OVERLAID.matches) this.#open(""); }

  get #wanted() { return this.hasEngine ? localStorage.getItem(VIEW) || "both" : "chat"; }

  #show(view) {
    localStorage.setItem(VIEW, view);
    const shown = NARROW.matches && view === "both" ? "chat" : view;
    this.#root.dataset.view = shown;
    document.querySelector(`input[name="view"][value="${shown}"]`).checked = true;
  }

  #choose(side) {
    localStorage.setItem(SIDE, side);
    this.#open(side);
  }

  #open(side) {
    this.#side = side;
    for (const one of SIDES) {
      byId(one).hidden = one !== side;
      byId(`toggle-${one}`).setAttribute("aria-expanded", String(one === side));
    }
    for (const behind of document.querySelectorAll("#chat, #engine, .top")) behind.inert = Boolean(side) && OVERLAID.matches;
    if (side && OVERLAID.matches) byId(side).querySelector("textarea, .new-chat").focus();
  }
}
