// The dialog for the API key.

import { byId } from "./elements.js";

export function connectKeyDialog(server) {
  const dialog = byId("key-dialog"), field = byId("key"), refused = byId("key-refused");
  let settle = null;

  function ask(wasRefused) {
    refused.hidden = !wasRefused;
    field.value = server.key;
    dialog.returnValue = "";
    if (!dialog.open) dialog.showModal();
    return new Promise(resolve => { settle = resolve; });
  }

  function end(key) {
    if (key !== null) server.key = key;
    dialog.close();
    settle?.(Boolean(key));
    settle = null;
  }

  byId("key-form").addEventListener("submit", event => { event.preventDefault(); end(field.value.trim()); });
  byId("forget-key").addEventListener("click", () => end(""));
  byId("cancel-key").addEventListener("click", () => end(null));
  dialog.addEventListener("cancel", event => { event.preventDefault(); end(null); });
  byId("give-key").addEventListener("click", () => ask(false));
  server.askForKey = ask;
}
