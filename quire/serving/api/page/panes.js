// Which panes are shown: chat, engine or both, and the settings beside them.

import { byId } from "./elements.js";

const KEPT = "quire-view";
const NARROW = matchMedia("(max-width: 860px)");
const OVERLAID = matchMedia("(max-width: 1080px)");  // the settings lie over the rest
const ROOMY = matchMedia("(min-width: 1280px)");

export class Panes {
  #settings = byId("settings");
  #toggle = byId("toggle-settings");

  constructor() {
    byId("view").addEventListener("change", event => this.#show(event.target.value));
    NARROW.addEventListener("change", () => this.#show(this.#wanted));
    this.#show(this.#wanted);
    this.#toggle.addEventListener("click", () => this.#open(this.#settings.hidden));
    byId("close-settings").addEventListener("click", () => { this.#open(false); this.#toggle.focus(); });
    this.#settings.addEventListener("keydown", event => {
      if (event.key === "Escape" && OVERLAID.matches) { this.#open(false); this.#toggle.focus(); }
    });
    OVERLAID.addEventListener("change", () => this.#open(!this.#settings.hidden));
    this.#open(ROOMY.matches);
  }

  // A field of the settings, with the focus.
  showSetting(field) {
    this.#open(true);
    field.focus();
    field.reportValidity();
  }

  get #wanted() { return sessionStorage.getItem(KEPT) || "both"; }

  #show(view) {
    sessionStorage.setItem(KEPT, view);
    const shown = NARROW.matches && view === "both" ? "chat" : view;
    document.documentElement.dataset.view = shown;
    document.querySelector(`input[name="view"][value="${shown}"]`).checked = true;
  }

  #open(isOpen) {
    this.#settings.hidden = !isOpen;
    this.#toggle.setAttribute("aria-expanded", String(isOpen));
    for (const behind of document.querySelectorAll("#chat, #engine, .top")) behind.inert = isOpen && OVERLAID.matches;
    if (isOpen && OVERLAID.matches) this.#settings.querySelector("textarea").focus();
  }
}
