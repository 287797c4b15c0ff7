// The conversations that this browser keeps, for all tabs of this address: in IndexedDB, or in this tab where there is none.

import { Conversation } from "./conversation.js";

const NAME = "quire", TABLE = "conversations", FORMAT = "quire-conversations";

// Says `change` when the list has changed, in this tab or in another one.
export class ConversationStore extends EventTarget {
  #database = open().catch(() => null);
  #inMemory = new Map();
  #others = new BroadcastChannel("quire-conversations");

  constructor() {
    super();
    this.#others.addEventListener("message", () => this.dispatchEvent(new Event("change")));
  }

  // Whether conversations outlive this tab: not where the browser has no database, or no room for more.
  get isKept() { return this.#database.then(database => Boolean(database) && !this.#inMemory.size); }

  // All conversations as plain values, the newest first.
  async all() {
    const kept = await this.#run("readonly", table => table.getAll()) ?? [];
    const all = new Map([...kept, ...this.#inMemory.values()].map(plain => [plain.id, plain]));
    return [...all.values()].sort((one, other) => other.changed - one.changed);
  }

  async get(id) {
    const plain = this.#inMemory.get(id) ?? await this.#run("readonly", table => table.get(id));
    return plain ? Conversation.read(plain) : null;
  }

  async put(conversation) {
    const { plain } = conversation;
    const isKept = await this.#run("readwrite", table => table.put(plain)).catch(() => false);
    if (isKept) this.#inMemory.delete(plain.id);
    else this.#inMemory.set(plain.id, plain);
    this.#say();
  }

  async delete(id) {
    this.#inMemory.delete(id);
    await this.#run("readwrite", table => table.delete(id));
    this.#say();
  }

  // All, or one, as the text of a file.
  async exported(id = null) {
    const conversations = (await this.all()).filter(one => id === null || one.id === id);
    return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  }

  // Add the conversations of such a file, or the messages of a request; says how many came. Raises a TypeError or a
  // SyntaxError, with nothing added, where a file is something else.
  async import(text) {
    const file = JSON.parse(text), messages = Array.isArray(file) ? file : file?.messages;
    const read = file?.format === FORMAT ? file.conversations.map(Conversation.read) : [Conversation.ofMessages(messages ?? [])];
    const known = new Set((await this.all()).map(({ id }) => id));
    for (const conversation of read) {
      if (known.has(conversation.id)) conversation.id = new Conversation().id;  // what is here stays as it is
      await this.put(conversation);
    }
    return read.length;
  }

  // What a request to the table gives; undefined without a database.
  async #run(mode, ask) {
    const database = await this.#database;
    return database ? result(ask(database.transaction(TABLE, mode).objectStore(TABLE))) : undefined;
  }

  #say() {
    this.dispatchEvent(new Event("change"));
    this.#others.postMessage("");
  }
}

function open() {
  const request = indexedDB.open(NAME, 1);
  request.addEventListener("upgradeneeded", () => request.result.createObjectStore(TABLE, { keyPath: "id" }));
  return result(request);
}

const result = request => new Promise((resolve, reject) => {
  request.addEventListener("success", () => resolve(request.result));
  request.addEventListener("error", () => reject(request.error));
});
