// Puts the page together.

import { Chat } from "./chat.js";
import { ConversationList } from "./conversation_list.js";
import { ConversationStore } from "./conversation_store.js";
import { EngineView } from "./engine_view.js";
import { connectKeyDialog } from "./key_dialog.js";
import { ModelChoice } from "./models.js";
import { Panes } from "./panes.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { TextsView } from "./texts_view.js";
import { byId, element } from "./elements.js";

const server = new Server();
connectKeyDialog(server);
const models = new ModelChoice(server);
new TextsView(server, models);
const panes = new Panes();
const settings = new Settings(showModes);
const store = new ConversationStore();
const chat = new Chat({ server, models, settings, store, showSetting: field => panes.showSetting(field) });
new ConversationList(store, chat);
chat.addEventListener("open", () => panes.closeOverlay());
if (panes.hasEngine) new EngineView(server);
server.addEventListener("key", loadModels);
showModes();
loadModels();

function showModes() {
  byId("modes").replaceChildren(...settings.modes.map(mode => element("span", {}, mode)));
}

// Until the server can say what it serves; a router knows nothing before its first look at its servers.
async function loadModels() {
  try {
    await models.load();
    if (!models.name) setTimeout(loadModels, 1000);
  } catch (error) {
    if (error.status !== 401) setTimeout(loadModels, 3000);
  }
}
