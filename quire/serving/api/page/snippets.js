// A request as a command for a terminal, and as Python.

const OPENAI = new Set([
  "model", "messages", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "stop",
  "response_format", "logprobs", "top_logprobs", "tools", "tool_choice",
]);  // what OpenAI's client has arguments for

// Without what only a page needs.
function plain({ stream, stream_options, ...body }) { return body; }

const address = path => new URL(path, document.baseURI).href;

export function asCurl(body, needsKey) {
  const lines = [`curl ${quoted(address("v1/chat/completions"))}`, "-H 'Content-Type: application/json'"];
  if (needsKey) lines.push('-H "Authorization: Bearer $QUIRE_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(plain(body), null, 2))}`);
  return lines.join(" \\\n  ") + "\n";
}

const quoted = text => `'${text.replaceAll("'", "'\\''")}'`;

export function asPython(body, needsKey) {
  const fields = Object.entries(plain(body));
  const extra = fields.filter(([name]) => !OPENAI.has(name));
  const given = fields.filter(([name]) => OPENAI.has(name)).map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (extra.length) given.push(`    extra_body=${literal(Object.fromEntries(extra), "    ")},`);
  const key = needsKey ? 'os.environ["QUIRE_API_KEY"]' : '"none"';
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(address("v1"))}, api_key=${key})`,
    "completion = client.chat.completions.create(",
    ...given,
    ")",
    `print(completion.choices[0].message${body.tools ? "" : ".content"})`,
    "",
  ].join("\n");
}

// A value as Python writes it.
function literal(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const inner = indent + "    ";
  const parts = Array.isArray(value)
    ? value.map(part => literal(part, inner))
    : Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${literal(part, inner)}`);
  const line = open + parts.join(", ") + close;
  if (line.length + indent.length < 90 && !line.includes("\n")) return line;
  return `${open}\n${parts.map(part => `${inner}${part},\n`).join("")}${indent}${close}`;
}
