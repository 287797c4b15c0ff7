// What the AI SDK's schemas say about answers of a server: each is handed to its providers in place of the network.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenResponses } from "@ai-sdk/open-responses";
import { readFileSync } from "node:fs";

const url = "http://127.0.0.1/v1";
const providers = {
  anthropic: { "/v1/messages": (given) => createAnthropic(given)("m") },
  openai: {
    "/v1/chat/completions": (given) => createOpenAI(given).chat("m"),
    "/v1/completions": (given) => createOpenAI(given).completion("m"),
    "/v1/responses": (given) => createOpenAI(given).responses("m"),
  },
  "openai-compatible": {
    "/v1/chat/completions": (given) => createOpenAICompatible({ ...given, name: "m" }).chatModel("m"),
    "/v1/completions": (given) => createOpenAICompatible({ ...given, name: "m" }).completionModel("m"),
  },
  "open-responses": {
    "/v1/responses": (given) => createOpenResponses({ ...given, name: "m", url: `${url}/responses` })("m"),
  },
};
const asked = { prompt: [{ role: "user", content: [{ type: "text", text: "?" }] }], maxOutputTokens: 9 };
const errors = [];
const parts = {};

async function read(model, kind, count) {
  if (kind !== "text/event-stream") {
    for (const part of (await model.doGenerate(asked)).content) count(part.type);
    return;
  }
  for await (const part of (await model.doStream(asked)).stream) {
    count(part.type);
    if (part.type === "error") throw part.error;
  }
}

for (const { path, kind, body } of JSON.parse(readFileSync(process.argv[2]))) {
  const fetch = async () => new Response(body, { headers: { "content-type": kind } });
  for (const [name, models] of Object.entries(providers)) {
    if (!(path in models)) continue;
    const seen = (parts[`${name} ${path}`] ??= {});
    try {
      await read(models[path]({ baseURL: url, apiKey: "none", fetch }), kind, (type) => (seen[type] = (seen[type] ?? 0) + 1));
    } catch (error) {
      errors.push(`${name} ${path}: ${error} ${error.cause ?? ""}`.slice(0, 2000));
    }
  }
}
console.log(JSON.stringify({ errors, parts }));
