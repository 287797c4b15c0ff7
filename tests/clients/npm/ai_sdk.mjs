// The AI SDK over one of the APIs: text whole and streamed, an object whole and streamed, and tools.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey, api] = process.argv.slice(2);
const settings = { baseURL: url + "/v1", apiKey };
const models = {
  anthropic: () => createAnthropic(settings)("quill"),
  chat: () => createOpenAI(settings).chat("quill"),
  responses: () => createOpenAI(settings).responses("quill"),
};
const asked = { model: models[api](), maxRetries: 0, maxOutputTokens: 200, temperature: 0 };
const output = Output.object({ schema: z.object({ name: z.string(), city: z.string() }) });
const get_weather = tool({
  description: "Get the current weather in a city",
  inputSchema: z.object({ city: z.string().describe("The city") }),
  execute: async () => ({ temperature: -5, condition: "snowy" }),
});
const sum = { ...asked, prompt: "What is 12 + 30?" };
const person = { ...asked, prompt: "Extract name and city as JSON: Anna lives in Oslo.", output };
const weather = { ...asked, prompt: "What is the weather in Oslo?", tools: { get_weather }, stopWhen: stepCountIs(3) };
const errors = [];
const onError = ({ error }) => errors.push(String(error));

const whole = await generateText(sum);
const streamed = streamText({ ...sum, onError });
const seen = { whole: whole.text, usage: whole.usage, streamed: "" };
for await (const part of streamed.textStream) seen.streamed += part;
seen.object = (await generateText(person)).output;
const objects = streamText({ ...person, onError });
for await (const part of objects.partialOutputStream) seen.streamedObject = part;
const agent = await generateText(weather);
seen.calls = agent.steps.map((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
seen.answer = agent.text;
const streamedAgent = streamText({ ...weather, onError });
await streamedAgent.consumeStream();
seen.streamedCalls = (await streamedAgent.steps).map((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
seen.streamedAnswer = await streamedAgent.text;
console.log(JSON.stringify({ ...seen, errors }));
