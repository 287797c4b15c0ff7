// The settings of requests: what stands in the form, kept in this browser, as fields of a request.

import { byId } from "./elements.js";

const KEPT = "quire-settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const EXAMPLES = { schema: EXAMPLE_SCHEMA, tools: EXAMPLE_TOOLS };

export class Settings {
  #form = byId("settings-form");

  constructor(onChange) {
    this.#fill(JSON.parse(localStorage.getItem(KEPT) || "{}"));
    this.#form.addEventListener("submit", event => event.preventDefault());
    this.#form.addEventListener("input", () => { this.#changed(); onChange(); });
    byId("reset-settings").addEventListener("click", () => { this.#form.reset(); this.#fill({}); this.#changed(); onChange(); });
    this.#changed();
  }

  get system() { return this.#value("system").trim(); }

  // What the settings say in a few words each, of those that change the kind of answer.
  get modes() {
    return [
      this.#value("format") === "json_schema" && "JSON schema",
      this.#value("format") === "json_object" && "JSON",
      this.#checked("use_tools") && "tools",
      this.#checked("logprobs") && "log probabilities",
      this.system && "system prompt",
    ].filter(Boolean);
  }

  // The first field that cannot be sent as it stands, or null.
  get wrong() {
    return [...this.#form.elements].find(field => field.matches("input, textarea") && !field.validity.valid) ?? null;
  }

  // Fields of a request. A field that is empty is left to the server.
  fields() {
    const fields = {};
    for (const name of NUMBERS) if (this.#value(name) !== "") fields[name] = Number(this.#value(name));
    const stop = this.#value("stop").split("\n").filter(Boolean);
    if (stop.length) fields.stop = stop;
    const format = this.#value("format");
    if (format === "json_object") fields.response_format = { type: format };
    if (format === "json_schema") {
      fields.response_format = { type: format, json_schema: { name: "answer", strict: true, schema: this.#json("schema") } };
    }
    if (this.#checked("logprobs")) Object.assign(fields, { logprobs: true, top_logprobs: Number(this.#value("top_logprobs")) });
    if (this.#checked("use_tools")) Object.assign(fields, { tools: this.#json("tools"), tool_choice: this.#value("tool_choice") });
    return fields;
  }

  #field(name) { return this.#form.elements[name]; }
  #value(name) { return this.#field(name).value; }
  #checked(name) { return this.#field(name).checked; }
  #json(name) { return JSON.parse(this.#value(name)); }

  #fill(kept) {
    for (const [name, example] of Object.entries(EXAMPLES)) this.#field(name).value = JSON.stringify(example, null, 2);
    for (const [name, value] of Object.entries(kept)) {
      const field = this.#field(name);
      if (field) field[field.type === "checkbox" ? "checked" : "value"] = value;
    }
  }

  #changed() {
    const kept = {};
    for (const field of this.#form.elements) {
      if (field.name) kept[field.name] = field.type === "checkbox" ? field.checked : field.value;
    }
    localStorage.setItem(KEPT, JSON.stringify(kept));
    for (const part of this.#form.querySelectorAll("[data-when]")) {
      const [name, value] = part.dataset.when.split("=");
      part.hidden = value ? this.#value(name) !== value : !this.#checked(name);
    }
    this.#check("schema", this.#value("format") === "json_schema", value => value && typeof value === "object" && !Array.isArray(value), "A schema is a JSON object.");
    this.#check("tools", this.#checked("use_tools"), value => Array.isArray(value) && value.length > 0, "This is a list with at least one function.");
  }

  #check(name, used, isRight, otherwise) {
    let problem = "";
    if (used) {
      try {
        if (!isRight(this.#json(name))) problem = otherwise;
      } catch (error) {
        problem = `This is not JSON: ${error.message}`;
      }
    }
    const field = this.#field(name), said = this.#form.querySelector(`[data-problem="${name}"]`);
    field.setCustomValidity(problem);
    field.setAttribute("aria-invalid", String(Boolean(problem)));
    if (problem) field.setAttribute("aria-describedby", said.id);
    else field.removeAttribute("aria-describedby");
    if (said.textContent !== problem) said.textContent = problem;
    said.hidden = !problem;
  }
}
