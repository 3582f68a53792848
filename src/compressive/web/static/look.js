// Where the model looked when it predicted the chosen token: every layer and head, then one head slot by slot.

import { KINDS, colours, fitted, layout, slots, tokens } from "./memory.js";
import { bits, percent, shown, spoken } from "./words.js";

const TOP = 10; // slots in the table

const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};

export class Look {
  // `act(name)` does something at the chosen token.
  constructor(root, act) {
    this.root = root;
    this.act = act;
    this.head = null; // layer and head, once there is one to show
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(root);
  }

  hide() {
    this.root.hidden = true;
    this.seen = null;
  }

  // The first token was not predicted: there is nothing to see but what can be done.
  show(pane, token, seen) {
    this.pane = pane;
    this.seen = seen;
    this.root.hidden = false;
    const piece = seen ? seen.piece : pane.pieces[token - pane.start];
    const title = make("h2", "", shown(piece));
    title.id = "look-title";
    title.tabIndex = -1;
    title.append(" ", make("small", "", `token ${token.toLocaleString("en")} of text ${pane.id} · ${seen ? bits(seen.bits) : "the first is not predicted"}`));
    const actions = make("div", "row actions");
    for (const [name, label] of [["rewind", "Rewind to here"], ["fork", "Fork here"], ["compare", "Compare from here"], ["edit", "Edit from here"]]) {
      const button = make("button", "", label.split(" ")[0]);
      button.type = "button";
      button.setAttribute("aria-label", label);
      button.title = `${label} (${label[0]})`;
      button.setAttribute("aria-keyshortcuts", label[0]);
      button.addEventListener("click", () => this.act(name));
      actions.append(button);
    }
    this.root.replaceChildren(title, actions);
    if (!seen) return;
    this.root.append(this.likely(), make("h3", "", "Where each head looked"), this.heads(), make("div", "one"));
    this.pick();
  }

  likely() {
    const list = make("ol", "likely");
    list.setAttribute("aria-label", "Most likely tokens");
    for (const { piece, probability } of this.seen.likely) {
      const item = make("li", piece === this.seen.piece ? "is" : "");
      const bar = make("span", "bar");
      bar.style.setProperty("--share", probability);
      item.append(make("code", "", shown(piece)), bar, make("span", "share", percent(probability)));
      list.append(item);
    }
    return list;
  }

  // Shares of the three places for one head.
  shares(layer, head) {
    const row = slots(this.seen.memory, layer), sums = [0, 0, 0];
    this.seen.layers[layer][head].forEach((weight, i) => { sums[row[i].kind] += weight; });
    return sums;
  }

  heads() {
    const group = make("div", "heads");
    group.setAttribute("role", "radiogroup");
    group.setAttribute("aria-label", "Layers and heads");
    this.rows = [];
    this.seen.layers.forEach((heads, layer) => heads.forEach((_, head) => {
      const sums = this.shares(layer, head);
      const row = make("div", "head");
      row.setAttribute("role", "radio");
      row.setAttribute("aria-label", `Layer ${layer + 1}, head ${head + 1}: ${KINDS.map((kind, i) => `${kind} ${percent(sums[i])}`).join(", ")}`);
      const bar = make("span", "split");
      KINDS.forEach((kind, i) => {
        const part = make("span", kind);
        part.style.flexGrow = sums[i];
        bar.append(part);
      });
      const heat = make("canvas", "heat");
      row.append(make("span", "name", `L${layer + 1} H${head + 1}`), bar, make("span", "share", percent(sums[0])), heat);
      row.addEventListener("click", () => { this.head = [layer, head]; this.pick(); });
      row.addEventListener("keydown", (event) => this.key(event));
      this.rows.push({ row, heat, layer, head, sums });
      group.append(row);
    }));
    const caption = make("p", "note", "Bars: share of compressed memory, recent memory and window; the figure is that of compressed memory. Right: slot by slot, oldest first.");
    const box = make("div");
    box.append(group, caption);
    return box;
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    const now = this.rows.findIndex(({ row }) => row === event.currentTarget);
    if (event.key === "Escape") this.pane.text.focus();
    else if (event.key === " " || event.key === "Enter") event.currentTarget.click();
    else if (step) {
      const { layer, head, row } = this.rows[(now + step + this.rows.length) % this.rows.length];
      this.head = [layer, head];
      this.pick();
      row.focus();
    } else return;
    event.preventDefault();
  }

  // Shows one head: the one that was chosen, at first the one that looks most at compressed memory.
  pick() {
    if (!this.head) {
      const most = this.rows.reduce((a, b) => (b.sums[0] > a.sums[0] ? b : a));
      this.head = [most.layer, most.head];
    }
    const [layer, head] = this.head;
    for (const one of this.rows) {
      const is = one.layer === layer && one.head === head;
      one.row.setAttribute("aria-checked", String(is));
      one.row.tabIndex = is ? 0 : -1;
    }
    const row = slots(this.seen.memory, layer), { start, pieces } = this.seen.context;
    const text = (slot) => pieces.slice(slot.first - start, slot.last + 1 - start).join("");
    const top = this.seen.layers[layer][head]
      .map((weight, i) => ({ weight, ...row[i] }))
      .sort((a, b) => b.weight - a.weight)
      .slice(0, TOP);
    const table = make("table");
    const heading = table.createTHead().insertRow();
    for (const name of ["Share", "Slot", "Text"]) {
      const cell = make("th", "", name);
      cell.scope = "col";
      heading.append(cell);
    }
    const body = table.createTBody();
    for (const slot of top) {
      const line = body.insertRow();
      line.insertCell().textContent = percent(slot.weight);
      const kind = make("span", `key ${KINDS[slot.kind]}`, KINDS[slot.kind]);
      line.insertCell().append(kind, make("span", "numbers", slot.first < 0 ? "" : ` ${tokens(slot).replace(/^tokens? /, "")}`));
      const cell = line.insertCell();
      if (slot.first < 0) cell.textContent = "empty";
      else cell.append(this.quoted(slot, text));
    }
    const title = make("h3", "", `Layer ${layer + 1}, head ${head + 1}, slot by slot`);
    title.append(make("small", "", ` · tallest bar ${percent(top[0].weight)}`));
    const bars = make("canvas", "bars");
    bars.setAttribute("role", "img");
    bars.setAttribute("aria-label", `Attention of layer ${layer + 1}, head ${head + 1} on each slot; the table has the largest`);
    this.root.querySelector(".one").replaceChildren(title, bars, table);
    this.pane.underline(top.filter((slot) => slot.first >= 0).map((slot) => ({ ...slot, kind: KINDS[slot.kind] })));
    this.draw();
  }

  // A slot's text within the text around it.
  quoted(slot, text) {
    const around = 24, { start } = this.seen.context;
    const plain = (first, last) => (last < first ? "" : text({ first, last }).replace(/\n/g, "⏎"));
    const line = make("span", "quoted"), marked = make("mark", "", plain(slot.first, slot.last));
    marked.setAttribute("aria-label", spoken(text(slot)));
    line.append(
      make("span", "before", plain(Math.max(start, slot.first - around), slot.first - 1)),
      marked,
      make("span", "after", plain(slot.last + 1, slot.last + around)),
    );
    return line;
  }

  draw() {
    if (!this.seen || this.root.hidden || !this.rows?.length) return;
    const palette = colours(this.root);
    for (const { heat, layer, head } of this.rows) {
      const weights = this.seen.layers[layer][head], row = slots(this.seen.memory, layer);
      const { context, width, height } = fitted(heat, 12);
      const { edges, cell } = layout(row, width, 0);
      const most = Math.max(...weights);
      row.forEach((slot, i) => {
        context.globalAlpha = 1;
        context.fillStyle = palette.empty;
        context.fillRect(edges[i], 0, Math.max(0.6, cell), height);
        context.globalAlpha = Math.sqrt((weights[i] ?? 0) / most);
        context.fillStyle = palette.kinds[slot.kind];
        context.fillRect(edges[i], 0, Math.max(0.8, cell), height);
      });
    }
    const canvas = this.root.querySelector(".bars");
    const [layer, head] = this.head;
    const weights = this.seen.layers[layer][head], row = slots(this.seen.memory, layer);
    const { context, width, height } = fitted(canvas, 72);
    const { edges, cell } = layout(row, width, 0);
    const most = Math.max(...weights);
    row.forEach((slot, i) => {
      const tall = Math.max(1, (height - 2) * ((weights[i] ?? 0) / most));
      context.fillStyle = slot.first < 0 ? palette.line : palette.kinds[slot.kind];
      context.fillRect(edges[i], height - tall, Math.max(0.8, cell > 3 ? cell - 1 : cell), tall);
    });
  }
}
