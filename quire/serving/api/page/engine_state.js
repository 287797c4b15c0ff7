// What is known of one engine: frames have parts of the block map and of the tables, which are put together here.

const KEEP_S = 300;  // of history
const SMOOTH_S = 2;  // over which rates are taken
const GAP_S = 5;  // between two frames, behind which nobody knows what was
const OLD_S = 60;  // a table of a request that no frame lists is kept so long

export const FREE = 0, CACHED = 1, HELD = 2, SHARED = 3;
const KINDS = { ".": FREE, c: CACHED, h: HELD, H: HELD, s: SHARED, S: SHARED };

export class EngineState {
  kinds = new Uint8Array(0);  // of each block, the first at 0
  history = [];  // {now, stepMs, generated, computed} with tokens a second, stepMs null without a step; null where frames were missing
  tables = new Map();  // of each running request: {blocks, seen}
  waited = 0;
  #frames = [];
  #unseen = 0;  // blocks at the end of the map that no frame has had yet

  apply(frame) {
    const last = this.frame;
    if (last && (frame.now < last.now || frame.computed_tokens < last.computed_tokens)) this.#forget();  // another engine in its place
    if (last && frame.now - last.now > GAP_S) { this.history.push(null); this.#frames = []; }
    this.frame = frame;
    this.#frames.push(frame);
    while (this.#frames.length > 2 && frame.now - this.#frames[1].now >= SMOOTH_S) this.#frames.shift();
    this.#applyTables(frame);
    this.#applyBlocks(frame);
    this.#applyRates(frame);
  }

  // Whether every block was seen once.
  get isSwept() { return this.#unseen === 0; }

  // Blocks of each kind. What is held altogether is as the engine says it; the parts are those of the map, or of the part
  // of it that was seen.
  get sums() {
    const { blocks, free_blocks: free } = this.frame.counts, seen = [0, 0, 0, 0];
    for (const kind of this.kinds) seen[kind]++;
    const all = kind => Math.round(seen[kind] * blocks / Math.max(1, blocks - this.#unseen));
    const held = blocks - free, shared = Math.min(held, all(SHARED)), cached = Math.min(free, all(CACHED));
    return { free: free - cached, cached, held: held - shared, shared };
  }

  // Requests that hold a block.
  ownersOf(block) {
    return [...this.tables].filter(([, table]) => table.blocks.includes(block)).map(([id]) => id);
  }

  blocksOf(id) { return this.tables.get(id)?.blocks ?? []; }

  #forget() {
    this.kinds = new Uint8Array(0);
    this.tables.clear();
    this.history.push(null);
    this.#frames = [];
  }

  #applyTables({ now, running, tables, counts }) {
    const listed = new Set(running.id), isWhole = counts.running <= running.id.length;
    for (const [id, first, blocks] of tables) {
      const table = this.tables.get(id) ?? { blocks: [] };
      table.blocks.length = Math.min(table.blocks.length, Math.max(first + blocks.length, this.#expected(id, running)));
      blocks.forEach((block, at) => { table.blocks[first + at] = block; });
      table.seen = now;
      this.tables.set(id, table);
    }
    for (const [id, { blocks, seen }] of this.tables) {
      if (listed.has(id) || !(isWhole || now - seen > OLD_S)) continue;
      this.tables.delete(id);
      for (const block of blocks) if (this.kinds[block - 1] === HELD) this.kinds[block - 1] = CACHED;  // until the map comes round
    }
  }

  // Entries that a request's table may have: not all of them are in one frame.
  #expected(id, running) {
    const at = running.id.indexOf(id);
    return at < 0 ? 0 : Math.ceil(running.known[at] / this.frame.block_size);
  }

  #applyBlocks({ counts, blocks: [first, letters] }) {
    if (this.kinds.length !== counts.blocks) {
      this.kinds = new Uint8Array(counts.blocks);
      this.#unseen = counts.blocks;
    }
    this.#unseen = Math.min(this.#unseen, Math.max(0, counts.blocks - (first - 1 + letters.length)));
    for (let i = 0; i < letters.length; i++) this.kinds[first - 1 + i] = KINDS[letters[i]] ?? FREE;
    for (const { blocks } of this.tables.values()) {
      for (const block of blocks) if (block && this.kinds[block - 1] < HELD) this.kinds[block - 1] = HELD;
    }
  }

  #applyRates({ now, step, step_ms }) {
    const stepMs = step > (this.#frames.at(-2)?.step ?? step) ? step_ms : null;
    const [first] = this.#frames, last = this.frame, seconds = last.now - first.now;
    if (seconds > 0) {
      const rate = name => Math.max(0, last[name] - first[name]) / seconds;
      this.history.push({ now, stepMs, generated: rate("generated_tokens"), computed: rate("computed_tokens") });
    }
    while (this.history.length && (this.history[0] === null || now - this.history[0].now > KEEP_S)) this.history.shift();
  }
}
