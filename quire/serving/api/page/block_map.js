// The map of all KV blocks, on a canvas: a cell for a block, or for several where there are many.

import { CACHED, FREE, HELD, SHARED } from "./engine_state.js";
import { hideTip, showTip } from "./tip.js";

const MAX_CELLS = 1024;
const MIN_PITCH = 7, MAX_PITCH = 12;  // pixels from a cell to the next
const MAX_HEIGHT = 140;
const NAMES = { [FREE]: "free", [CACHED]: "free, contents kept", [HELD]: "held", [SHARED]: "shared" };

export class BlockMap {
  #canvas; #swatches; #said;
  #state = null;
  #chosen = "";  // the request whose blocks are marked
  #cursor = -1;  // the cell that the keyboard is at

  // `swatches`: elements of the legend by kind, which have the colours; `said`: where the keyboard's cell is told.
  constructor(canvas, swatches, said) {
    this.#canvas = canvas;
    this.#swatches = swatches;
    this.#said = said;
    canvas.addEventListener("pointermove", event => this.#point(event));
    canvas.addEventListener("pointerleave", () => { hideTip(); this.#mark(""); });
    canvas.addEventListener("keydown", event => this.#move(event));
    canvas.addEventListener("blur", () => { this.#cursor = -1; hideTip(); this.#mark(""); });
    new ResizeObserver(() => this.#draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  show(state) {
    this.#state = state;
    this.#draw();
  }

  // Mark a request's blocks; "" for none.
  choose(id) {
    this.#chosen = id;
    this.#draw();
  }

  #pointed = "";
  #mark(id) {
    if (id === this.#pointed) return;
    this.#pointed = id;
    this.#draw();
  }

  get #layout() {
    const blocks = this.#state.kinds.length, each = 2 ** Math.max(0, Math.ceil(Math.log2(blocks / MAX_CELLS)));
    const cells = Math.ceil(blocks / each), width = this.#canvas.parentElement.clientWidth;
    const area = Math.sqrt(width * Math.min(MAX_HEIGHT, Math.max(80, width * 0.25)) / Math.max(1, cells));
    const columns = Math.max(1, Math.floor(width / Math.min(MAX_PITCH, Math.max(MIN_PITCH, area))));
    const pitch = width / columns;
    return { blocks, each, cells, columns, pitch, rows: Math.ceil(cells / columns), width };
  }

  #draw() {
    if (!this.#state?.kinds.length || !this.#canvas.parentElement.clientWidth) return;
    const { blocks, each, cells, columns, pitch, rows, width } = this.#layout, scale = devicePixelRatio || 1;
    const height = Math.round(rows * pitch);
    if (this.#canvas.width !== Math.round(width * scale) || this.#canvas.height !== Math.round(height * scale)) {
      this.#canvas.width = Math.round(width * scale);
      this.#canvas.height = Math.round(height * scale);
      this.#canvas.style.height = `${height}px`;
    }
    const paint = this.#canvas.getContext("2d"), size = pitch - (pitch > 9 ? 2 : 1);
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.clearRect(0, 0, width, height);
    const colours = this.#swatches.map(swatch => getComputedStyle(swatch).backgroundColor);
    for (let cell = 0; cell < cells; cell++) {
      const x = (cell % columns) * pitch, top = Math.floor(cell / columns) * pitch;
      let y = top;
      for (const [kind, part] of this.#partsOf(cell, each, blocks)) {
        paint.fillStyle = colours[kind];
        paint.fillRect(x, y, size, part * size);
        y += part * size;
      }
    }
    this.#drawMarks(paint, { each, columns, pitch, size });
  }

  // Kinds in a cell from top to bottom, and the share of each.
  *#partsOf(cell, each, blocks) {
    const { kinds } = this.#state;
    if (each === 1) return yield [kinds[cell], 1];
    const counts = [0, 0, 0, 0], end = Math.min(blocks, (cell + 1) * each);
    for (let block = cell * each; block < end; block++) counts[kinds[block]]++;
    for (let kind = 0; kind < 4; kind++) if (counts[kind]) yield [kind, counts[kind] / (end - cell * each)];
  }

  #drawMarks(paint, { each, columns, pitch, size }) {
    paint.strokeStyle = paint.fillStyle = getComputedStyle(this.#canvas).color;
    paint.lineWidth = 1.5;
    const at = cell => [(cell % columns) * pitch, Math.floor(cell / columns) * pitch];
    for (const block of new Set(this.#state.blocksOf(this.#pointed || this.#chosen))) {
      const [x, y] = at(Math.floor((block - 1) / each));
      paint.fillRect(x + size * 0.28, y + size * 0.28, size * 0.44, size * 0.44);
    }
    if (this.#cursor >= 0) {
      const [x, y] = at(this.#cursor);
      paint.strokeRect(x - 0.75, y - 0.75, size + 1.5, size + 1.5);
    }
  }

  #point({ offsetX, offsetY, clientX, clientY }) {
    if (!this.#state) return;
    const { columns, pitch, cells } = this.#layout;
    const cell = Math.floor(offsetY / pitch) * columns + Math.min(columns - 1, Math.max(0, Math.floor(offsetX / pitch)));
    if (cell < 0 || cell >= cells) return hideTip();
    this.#tell(cell, clientX, clientY);
  }

  // Says what a cell is, and marks the blocks of the request that has it.
  #tell(cell, x, y) {
    const { each, blocks } = this.#layout, first = cell * each + 1, last = Math.min(blocks, first + each - 1);
    const owners = new Set();
    for (let block = first; block <= last; block++) this.#state.ownersOf(block).forEach(id => owners.add(id));
    const names = [...owners];
    const kinds = [...this.#partsOf(cell, each, blocks)].map(([kind, part]) => each === 1 ? NAMES[kind] : `${Math.round(part * (last - first + 1))} ${NAMES[kind]}`);
    const whose = names.length ? `\n${names.length > 1 ? "Requests" : "Request"} ${names.slice(0, 6).join(", ")}${names.length > 6 ? " …" : ""}` : "";
    const text = `${first === last ? `Block ${first}` : `Blocks ${first} to ${last}`}: ${kinds.join(", ")}${whose}`;
    showTip(text, x, y);
    this.#mark(names.length === 1 ? names[0] : "");
    return text;
  }

  #move(event) {
    if (!this.#state) return;
    const { columns, cells, pitch } = this.#layout;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = this.#cursor < 0 ? 0 : this.#cursor + step;
    if (next < 0 || next >= cells) return;
    this.#cursor = next;
    const { left, top } = this.#canvas.getBoundingClientRect();
    this.#said.textContent = this.#tell(next, left + (next % columns + 0.5) * pitch, top + Math.floor(next / columns) * pitch);
    this.#draw();
  }
}
