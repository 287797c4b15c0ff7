// The stream of frames: open while somebody looks, opened again when it has ended.

import { events } from "./server.js";

const SILENT_S = 6;
const MAX_WAIT_S = 10;

// Says `frame` with a frame as `detail`, and `state` with {state: "live" | "wait" | "lost" | "key" | "off", text}.
export class Frames extends EventTarget {
  #server;
  #looking = null;
  #silence = 0;

  constructor(server) {
    super();
    this.#server = server;
    server.addEventListener("key", () => { if (this.#looking) { this.look(false); this.look(true); } });
  }

  look(isLooking) {
    if (isLooking === Boolean(this.#looking)) return;
    this.#looking?.abort();
    clearTimeout(this.#silence);
    this.#looking = isLooking ? new AbortController() : null;
    if (isLooking) this.#follow(this.#looking.signal);
    else this.#say("off", "Not looking");
  }

  async #follow(signal) {
    let wait = 1;
    this.#say("wait", "Connecting …");
    while (!signal.aborted) {
      let why = "The stream has ended", pause = wait;
      try {
        const answer = await this.#server.call("engine/frames", { signal, asks: false });
        for await (const { event, data } of events(answer)) {
          if (signal.aborted) return;
          if (event === "end") why = `The server is ${{ draining: "shutting down", dead: "dead" }[JSON.parse(data).state] ?? "ending"}`;
          else this.#show(JSON.parse(data));
          wait = pause = 1;
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) return this.#say("key", "Needs an API key");
        if (error.status === 404) return this.#say("lost", "This server has no live picture.");
        why = error.message.replace(/\.$/, "");
        pause = Math.max(wait, error.retryAfter || 0);
      }
      clearTimeout(this.#silence);
      await this.#countDown(why, pause, signal);
      wait = Math.min(wait * 2, MAX_WAIT_S);
    }
  }

  #show(frame) {
    clearTimeout(this.#silence);
    this.#silence = setTimeout(() => this.#say("lost", `Nothing new for ${SILENT_S} s`), SILENT_S * 1000);
    const text = { ready: "Live", starting: "The engine starts", recovering: "The engine is replaced" }[frame.state] ?? frame.state;
    this.#say(frame.state === "ready" ? "live" : "lost", text);
    this.dispatchEvent(new CustomEvent("frame", { detail: frame }));
  }

  async #countDown(why, seconds, signal) {
    this.#say("lost", `${why}; trying again in ${Math.ceil(seconds)} s`);
    await new Promise(resolve => {
      const timer = setTimeout(resolve, seconds * 1000);
      signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
    });
  }

  #say(state, text) {
    this.dispatchEvent(new CustomEvent("state", { detail: { state, text } }));
  }
}
