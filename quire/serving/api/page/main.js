// Puts the page together.

import { Chat } from "./chat.js";
import { EngineView } from "./engine_view.js";
import { connectKeyDialog } from "./key_dialog.js";
import { ModelChoice } from "./models.js";
import { Panes } from "./panes.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { byId, element } from "./elements.js";

const server = new Server();
connectKeyDialog(server);
const models = new ModelChoice(server);
const panes = new Panes();
const settings = new Settings(showModes);
new Chat(server, models, settings, field => panes.showSetting(field));
new EngineView(server);
server.addEventListener("key", loadModels);
showModes();
loadModels();

function showModes() {
  byId("modes").replaceChildren(...settings.modes.map(mode => element("span", {}, mode)));
}

// Until the server can say what it serves.
async function loadModels() {
  try {
    await models.load();
  } catch (error) {
    if (error.status !== 401) setTimeout(loadModels, 3000);
  }
}
