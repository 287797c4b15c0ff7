// The server that the page came from: requests with the key, its errors, and server-sent events.

const KEY = "quire-key";

// What the server says instead of an answer; of status 0 where it says nothing.
export class ServerError extends Error {
  constructor({ message, code = "" }, status, retryAfter = 0) {
    super(message);
    Object.assign(this, { code, status, retryAfter });  // seconds until one may try again, or 0
  }
}

// Says `key` when another key is used.
export class Server extends EventTarget {
  #askForKey = async () => false;
  #asking = null;

  get key() { return sessionStorage.getItem(KEY) || ""; }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    this.dispatchEvent(new Event("key"));
  }

  // Who asks the user for a key, told whether one was refused; says whether there is one now. Several requests that need one ask once.
  set askForKey(ask) { this.#askForKey = ask; }

  // The answer, if it is a good one. `asks`: whether the user is asked for a key where one is missing.
  async call(path, { asks = true, ...options } = {}) {
    const used = this.key;
    const headers = { ...options.headers, ...(used && { Authorization: `Bearer ${used}` }) };
    if (options.body) headers["Content-Type"] = "application/json";
    const answer = await this.#fetch(path, { ...options, headers });
    if (answer.status === 401 && asks) {
      const another = this.key !== used || await (this.#asking ??= this.#askForKey(Boolean(used)).finally(() => { this.#asking = null; }));
      if (another) return this.call(path, { asks, ...options });
    }
    if (!answer.ok) throw await errorOf(answer);
    return answer;
  }

  async #fetch(path, options) {
    try {
      return await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError({ message: "The server does not answer." }, 0);
    }
  }
}

async function errorOf(answer) {
  const body = await answer.json().catch(() => null);
  const error = body?.error?.message ? body.error : { message: `The server answered ${answer.status}.` };
  return new ServerError(error, answer.status, Number(answer.headers.get("Retry-After")) || 0);
}

// The events of a stream, each with its name and its data as text.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let part; !(part = await reader.read()).done;) {
      const whole = (rest + part.value).split("\n\n");
      rest = whole.pop();
      for (const text of whole) yield parseEvent(text);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(text) {
  const found = { event: "message", data: "" };
  for (const line of text.split("\n")) {
    const colon = line.indexOf(": ");
    if (colon > 0) found[line.slice(0, colon)] = line.slice(colon + 2);
  }
  return found;
}
