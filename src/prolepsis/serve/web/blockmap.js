// The pool of blocks as a map: one cell for each block, or for as many as it takes where there are too many to see.

import { byId } from "./dom.js";
import { count } from "./format.js";

const SMALLEST = 4; // CSS pixels of a cell: smaller ones cannot be told apart
const ROUND = 7; // from here on corners can be seen
const LARGEST = 20;
const HEIGHT = 168;

/** How many blocks a cell, and cells of which size in how many columns and rows, show `blocks` in `width` pixels. */
export function layout(blocks, width) {
  const room = Math.floor(width / SMALLEST) * Math.floor(HEIGHT / SMALLEST);
  const each = Math.max(1, Math.ceil(blocks / Math.max(1, room)));
  const cells = Math.ceil(blocks / each);
  let columns = Math.max(1, Math.ceil(width / LARGEST));
  while (Math.ceil(cells / columns) * (width / columns) > HEIGHT && width / columns > SMALLEST) columns += 1;
  return { each, cells, columns, rows: Math.ceil(cells / columns), size: width / columns };
}

export class BlockMap {
  constructor() {
    this.canvas = byId("block-map");
    this.tip = byId("block-tip");
    this.blocks = new Uint8Array(0);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.draw()).observe(byId("engine")); // not the canvas: drawing sets its height
  }

  /**
   * Show `blocks`, for each the index of its kind in `kinds`, which are {style, word}: a class of the style sheet and
   * what such a block is. Of blocks that share a cell the last kind is seen. `describe` says of a block what it is.
   */
  show(blocks, kinds, describe, words) {
    this.blocks = blocks;
    this.kinds = kinds;
    this.describe = describe;
    this.canvas.setAttribute("aria-label", `Map of the block pool: ${words}`);
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !this.blocks.length) return;
    this.layout = layout(this.blocks.length, width);
    const { cells, size, columns, rows, each } = this.layout;
    const height = Math.ceil(rows * size);
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const gap = size >= 10 ? 2 : 1;
    const colours = this.kinds.map(({ style }) => colourOf(style));
    for (let cell = 0; cell < cells; cell += 1) {
      context.fillStyle = colours[this.foremost(cell * each, each)];
      const [left, top] = [Math.round((cell % columns) * size), Math.round(Math.floor(cell / columns) * size)];
      const [right, bottom] = [Math.round(((cell % columns) + 1) * size), Math.round((Math.floor(cell / columns) + 1) * size)];
      if (size < ROUND) {
        context.fillRect(left, top, right - left - gap, bottom - top - gap);
        continue;
      }
      context.beginPath();
      context.roundRect(left, top, right - left - gap, bottom - top - gap, size / 5);
      context.fill();
    }
  }

  foremost(from, each) {
    let kind = 0;
    const to = Math.min(from + each, this.blocks.length);
    for (let block = from; block < to; block += 1) kind = Math.max(kind, this.blocks[block]);
    return kind;
  }

  point(event) {
    if (!this.layout) return;
    const { size, columns, cells, each } = this.layout;
    const column = Math.floor(event.offsetX / size);
    const cell = Math.floor(event.offsetY / size) * columns + column;
    this.tip.hidden = column >= columns || cell >= cells;
    if (this.tip.hidden) return;
    this.tip.textContent = this.words(cell * each, Math.min((cell + 1) * each, this.blocks.length));
    const left = Math.min(event.offsetX + 12, this.canvas.clientWidth - this.tip.offsetWidth);
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${event.offsetY + 16}px`;
  }

  words(from, to) {
    if (to - from === 1) return `Block ${count(from)}: ${this.describe(from)}`;
    const numbers = new Map();
    for (let block = from; block < to; block += 1) {
      const { word } = this.kinds[this.blocks[block]];
      numbers.set(word, (numbers.get(word) ?? 0) + 1);
    }
    const parts = [...numbers].map(([word, number]) => `${count(number)} ${word}`);
    return `Blocks ${count(from)} to ${count(to - 1)}: ${parts.join(", ")}`;
  }
}

/** The colour that the style sheet gives to a class, as a canvas can use it. */
function colourOf(style) {
  const probe = document.createElement("i");
  probe.className = `swatch ${style}`;
  probe.hidden = true;
  document.body.append(probe);
  const colour = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return colour;
}
