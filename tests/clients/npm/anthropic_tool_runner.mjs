// Anthropic's tool runner for TypeScript, whole and streamed.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const cities = [];
const get_weather = betaZodTool({
  name: "get_weather",
  description: "Get the current weather in a city",
  inputSchema: z.object({ city: z.string().describe("The city") }),
  run: ({ city }) => {
    cities.push(city);
    return JSON.stringify({ temperature: -5, condition: "snowy" });
  },
});
const asked = {
  model: "quill",
  max_tokens: 200,
  messages: [{ role: "user", content: "What is the weather in Oslo?" }],
  tools: [get_weather],
};
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");
const whole = textOf(await client.beta.messages.toolRunner(asked));
let streamed = "";
for await (const stream of client.beta.messages.toolRunner({ ...asked, stream: true })) {
  streamed = textOf(await stream.finalMessage());
}
console.log(JSON.stringify({ whole, streamed, cities }));
