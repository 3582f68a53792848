// The strip above a text: both memories of every layer and the window, one cell per slot, drawn on a canvas.

import { shown } from "./words.js";

export const KINDS = ["compressed", "recent", "window"];
const MOVE = 450; // milliseconds that slots take to their new cells
const still = matchMedia("(prefers-reduced-motion: reduce)");

// The slots of a layer, in order: kind, first and last token, or -1 for a slot that holds none.
export function slots(memory, layer) {
  const place = memory.places[memory.layers[layer]];
  const { start, filled, size } = memory.window;
  return [
    ...place.firsts.map((first, i) => ({ kind: 0, first, last: place.lasts[i] })),
    ...place.recent.map((token) => ({ kind: 1, first: token, last: token })),
    ...Array.from({ length: size }, (_, i) => ({ kind: 2, first: i < filled ? start + i : -1, last: i < filled ? start + i : -1 })),
  ];
}

export function colours(element) {
  const style = getComputedStyle(element);
  const value = (name) => style.getPropertyValue(name).trim();
  return { kinds: KINDS.map((kind) => value(`--${kind}`)), empty: value("--empty"), ink: value("--ink"), soft: value("--soft"), line: value("--line") };
}

// Sizes a canvas to its place in the page, in device pixels; returns its context and its size in CSS pixels.
export function fitted(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// Left edges of all slots of a layer, and their width: three groups with a gap between them.
export function layout(row, width, left) {
  const gap = 8;
  const counts = KINDS.map((_, kind) => row.filter((slot) => slot.kind === kind).length);
  const gaps = counts.filter((count) => count > 0).length - 1;
  const cell = (width - left - gap * Math.max(0, gaps)) / Math.max(1, row.length);
  let x = left;
  const edges = row.map((slot, i) => {
    if (i > 0 && row[i - 1].kind !== slot.kind) x += gap;
    const edge = x;
    x += cell;
    return edge;
  });
  return { edges, cell };
}

export class Strip {
  constructor(canvas, sum, hint, pieceOf) {
    Object.assign(this, { canvas, sum, hint, pieceOf, memory: null, before: null, began: 0, frame: 0, cursor: null });
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => this.tell(null));
  }

  // Shows memory, moving slots from where they were if a window has ended.
  show(memory) {
    const ended = this.memory && memory && memory.window.start === this.memory.window.start + memory.window.size;
    this.before = ended && !still.matches ? { ...this.memory, window: { ...this.memory.window, filled: memory.window.size } } : null;
    this.memory = memory;
    this.began = performance.now();
    this.describe();
    this.draw();
  }

  grow(length) {
    if (!this.memory) return;
    const { start, size } = this.memory.window;
    this.memory.window.filled = Math.min(size, length - start);
    this.describe();
    this.draw();
  }

  describe() {
    if (!this.memory) return;
    const { start, filled } = this.memory.window;
    const length = start + filled;
    const held = this.memory.places.map((place) => {
      const tokens = place.firsts.reduce((sum, first, i) => sum + (first < 0 ? 0 : place.lasts[i] - first + 1), 0);
      return { tokens: tokens + place.recent.filter((token) => token >= 0).length + filled, slots: place };
    });
    const kept = Math.min(length, Math.max(...held.map((one) => one.tokens)));
    const { firsts, recent } = held[0].slots;
    const full = (row) => `${row.filter((token) => token >= 0).length} of ${row.length}`;
    this.sum.textContent = `${length.toLocaleString("en")} tokens read, ${kept.toLocaleString("en")} in memory or window, ${(length - kept).toLocaleString("en")} forgotten`;
    this.canvas.setAttribute("aria-label",
      `Memory of ${this.memory.layers.length} layers: compressed slots filled ${full(firsts)}, recent ${full(recent)}, window ${filled} of ${this.memory.window.size}. Arrow keys go from slot to slot.`);
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    if (!this.memory || !this.canvas.clientWidth) return;
    const layers = this.memory.layers.length;
    const tall = Math.max(5, Math.min(14, 120 / layers));
    const { context, width } = fitted(this.canvas, layers * (tall + 4));
    const palette = colours(this.canvas);
    const part = this.before ? Math.min(1, (performance.now() - this.began) / MOVE) : 1;
    const eased = 1 - (1 - part) ** 3;
    this.rows = [];
    for (let layer = 0; layer < layers; layer++) {
      const row = slots(this.memory, layer);
      const { edges, cell } = layout(row, width, 22);
      const top = layer * (tall + 4);
      this.rows.push({ row, edges, cell, top, bottom: top + tall + 4 });
      context.fillStyle = palette.soft;
      context.font = "10px system-ui, sans-serif";
      context.textBaseline = "middle";
      context.fillText(`L${layer + 1}`, 0, top + tall / 2 + 0.5);
      const air = cell > 3 ? 1 : cell > 1.5 ? 0.4 : 0;
      const fill = (slot, x, wide, alpha) => {
        context.globalAlpha = alpha;
        context.fillStyle = slot.first < 0 ? palette.empty : palette.kinds[slot.kind];
        context.fillRect(x, top, Math.max(0.6, wide - air), tall);
      };
      if (part < 1) this.moved(row, edges, cell, layer, width, eased, fill);
      else row.forEach((slot, i) => fill(slot, edges[i], cell, 1));
      context.globalAlpha = 1;
    }
    if (this.cursor && part === 1 && this.cursor.i < this.rows[this.cursor.layer].row.length) {
      const { edges, cell, top } = this.rows[this.cursor.layer];
      context.strokeStyle = palette.ink;
      context.lineWidth = 2;
      context.strokeRect(edges[this.cursor.i] - 1, top, Math.max(3, cell + 1), tall);
    }
    if (part < 1) this.draw();
    else this.before = null;
  }

  // Between two windows: every slot on its way from the slots that it was made of; the forgotten fade at the left.
  moved(row, edges, cell, layer, width, eased, fill) {
    const old = slots(this.before, layer);
    const was = layout(old, width, 22);
    const from = new Map();
    old.forEach((slot, i) => {
      if (slot.first < 0) return;
      for (let token = slot.first; token <= slot.last; token++) from.set(token, { x: was.edges[i], end: was.edges[i] + was.cell });
    });
    const alive = new Set();
    row.forEach((slot, i) => {
      if (slot.first < 0) return fill(slot, edges[i], cell, 1);
      for (let token = slot.first; token <= slot.last; token++) alive.add(token);
      const a = from.get(slot.first), b = from.get(slot.last);
      if (!a || !b) return fill(slot, edges[i], cell, eased);
      const mix = (x, y) => x + (y - x) * eased;
      const x = mix(a.x, edges[i]);
      fill(slot, x, mix(b.end, edges[i] + cell) - x, 1);
    });
    old.forEach((slot, i) => {
      if (slot.first >= 0 && !alive.has(slot.first)) fill(slot, was.edges[i] - 30 * eased, was.cell, 1 - eased);
    });
  }

  point(event) {
    if (!this.rows) return;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const layer = this.rows.findIndex((row) => y >= row.top && y < row.bottom);
    if (layer < 0) return;
    const { edges, cell } = this.rows[layer];
    const i = edges.findIndex((edge) => x >= edge && x < edge + cell);
    if (i >= 0) this.tell({ layer, i });
  }

  key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!this.rows || !steps[event.key]) return;
    const [down, right] = steps[event.key], now = this.cursor ?? { layer: 0, i: -1 };
    const within = (n, count) => Math.min(count - 1, Math.max(0, n));
    const layer = within(now.layer + down, this.rows.length);
    this.tell({ layer, i: within(now.i + right, this.rows[layer].row.length) });
    event.preventDefault();
  }

  // Marks a slot, and says what it was made of.
  async tell(cursor) {
    const asked = (this.cursor = cursor);
    this.draw();
    if (!cursor) {
      this.hint.textContent = "";
      return;
    }
    const slot = this.rows[cursor.layer].row[cursor.i];
    const text = slot.first < 0 ? "" : await this.pieceOf(slot.first, slot.last + 1);
    if (this.cursor !== asked) return;
    const name = `Layer ${cursor.layer + 1}, ${KINDS[slot.kind]}`;
    this.hint.textContent = slot.first < 0 ? `${name}: empty` : `${name}: ${tokens(slot)} ${shown(text)}`;
  }
}

export const tokens = (slot) => (slot.first === slot.last ? `token ${slot.first}` : `tokens ${slot.first}–${slot.last}`);
