// One text: its memory, its tokens coloured by surprise, and what can be done with it.

import { get, post, stream } from "./api.js";
import { Strip } from "./memory.js";
import { bits, shown, spoken } from "./words.js";

export const LEVELS = [1, 2, 4, 6, 9]; // bits at which the colour changes
const PAGE = 3000; // tokens that are shown at first, and with every click on "earlier"
const MOST = 9000; // tokens that are shown at a time
const level = (value) => (value === null ? 0 : LEVELS.filter((limit) => value >= limit).length);

export class Pane {
  // `app` has say(text), problem(error), chosen(pane, token), changed(pane) and act(name, pane).
  constructor(app, summary) {
    this.app = app;
    this.id = summary.id;
    this.chosen = null;
    this.stopper = null;
    this.start = this.length = 0;
    this.pieces = [];
    this.bits = [];
    this.root = document.getElementById("pane").content.cloneNode(true).firstElementChild;
    this.find = (selector) => this.root.querySelector(selector);
    this.text = this.find(".text");
    this.strip = new Strip(this.find(".strip"), this.find(".sum"), this.find(".hint"), (a, b) => this.piecesOf(a, b));
    this.prepare();
    this.summarise(summary);
  }

  prepare() {
    this.root.setAttribute("aria-label", `Text ${this.id}`);
    const ramp = this.find(".ramp");
    ["0", ...LEVELS.map(String)].forEach((label, i, all) => {
      const swatch = document.createElement("span");
      swatch.className = `s${i}`;
      swatch.textContent = i === all.length - 1 ? `${label}+` : label;
      ramp.append(swatch);
    });
    this.find(".go").addEventListener("click", () => this.toggle());
    this.find(".earlier").addEventListener("click", () => this.page(Math.max(0, this.start - PAGE)));
    this.find(".later").addEventListener("click", () => this.page(this.start + PAGE));
    this.find(".sizes").addEventListener("submit", (event) => { event.preventDefault(); this.resize(); });
    this.find(".editor").addEventListener("submit", (event) => { event.preventDefault(); this.replace(); });
    this.find(".cancel").addEventListener("click", () => this.closeEditor());
    for (const name of ["temperature", "top-p"]) {
      const input = this.find(`.${name}`);
      input.addEventListener("input", () => { this.find(`.${name}-value`).textContent = input.value; });
    }
    this.text.addEventListener("click", (event) => {
      const token = event.target.closest("[data-n]");
      if (token && getSelection().isCollapsed) this.choose(Number(token.dataset.n));
    });
    this.text.addEventListener("keydown", (event) => this.key(event));
    const { limits } = this.app.model;
    this.find(".count").max = limits.tokens;
    for (const name of ["recent", "compressed"]) this.find(`.${name}-size`).max = limits.slots;
  }

  // What the server says about the text.

  summarise(summary) {
    const said = { ...summary };
    this.summary = said;
    this.length = said.length;
    const origin = said.parent ? `, from text ${said.parent} after ${said.at.toLocaleString("en")} tokens` : "";
    const mean = said.bits === null ? "" : ` · ${said.bits.toFixed(3)} bits per token`;
    this.find("h2").textContent = `Text ${said.id}${origin}${mean}`;
    for (const name of ["recent", "compressed"]) {
      const input = this.find(`.${name}-size`);
      if (document.activeElement !== input) input.value = Math.max(...said.sizes[name]);
    }
    if (said.memory) this.strip.show(said.memory);
  }

  async piecesOf(start, stop) {
    if (start >= this.start && stop <= this.start + this.pieces.length) {
      return this.pieces.slice(start - this.start, stop - this.start).join("");
    }
    const { page } = this.app.model.limits, parts = [];
    for (let at = start; at < stop; at += page) {
      parts.push(...(await get(`/api/texts/${this.id}/tokens?start=${at}&stop=${Math.min(stop, at + page)}`)).pieces);
    }
    return parts.join("");
  }

  // Showing tokens.

  async page(start) {
    const stop = Math.min(this.length, start + PAGE);
    const found = await get(`/api/texts/${this.id}/tokens?start=${start}&stop=${stop}`);
    this.start = found.start;
    this.pieces = [];
    this.bits = [];
    this.text.replaceChildren();
    this.add(found);
    this.text.scrollTop = stop === this.length ? this.text.scrollHeight : 0;
    if (this.chosen !== null) this.mark();
  }

  showEnd() {
    return this.page(Math.max(0, this.length - PAGE));
  }

  add({ start, pieces, bits }) {
    if (start !== this.start + this.pieces.length) return; // not at the end of what is shown
    const low = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 60;
    const fragment = document.createDocumentFragment();
    pieces.forEach((piece, i) => {
      const token = document.createElement("span");
      token.id = `text-${this.id}-${start + i}`;
      token.dataset.n = start + i;
      token.setAttribute("role", "option");
      token.className = `s${level(bits[i])}${piece.includes("\n") ? " newline" : ""}${start + i === this.summary.given ? " written" : ""}`;
      token.textContent = piece;
      fragment.append(token);
    });
    this.text.append(fragment);
    this.pieces.push(...pieces);
    this.bits.push(...bits);
    while (this.pieces.length > MOST) {
      for (let i = 0; i < PAGE; i++) this.text.firstChild.remove();
      this.pieces.splice(0, PAGE);
      this.bits.splice(0, PAGE);
      this.start += PAGE;
    }
    this.length = Math.max(this.length, start + pieces.length);
    this.find(".earlier").hidden = this.start === 0;
    this.find(".later").hidden = this.start + this.pieces.length >= this.length;
    if (low && this.chosen === null) this.text.scrollTop = this.text.scrollHeight;
  }

  span(n) {
    return document.getElementById(`text-${this.id}-${n}`);
  }

  // Choosing a token.

  choose(n) {
    this.unmark();
    this.chosen = n;
    this.mark();
    this.app.chosen(this, n);
  }

  mark() {
    const token = this.span(this.chosen);
    if (!token) return;
    const n = this.chosen - this.start;
    token.classList.add("chosen");
    token.setAttribute("aria-selected", "true");
    token.setAttribute("aria-label", `${spoken(this.pieces[n])}, ${bits(this.bits[n])}`);
    this.text.setAttribute("aria-activedescendant", token.id);
    token.scrollIntoView({ block: "nearest" });
  }

  unmark() {
    const token = this.chosen === null ? null : this.span(this.chosen);
    this.chosen = null;
    this.text.removeAttribute("aria-activedescendant");
    if (!token) return;
    token.classList.remove("chosen");
    token.removeAttribute("aria-selected");
    token.removeAttribute("aria-label");
  }

  // Underlines tokens that a head looked at; `seen` has kind, first and last.
  underline(seen) {
    for (const token of this.text.querySelectorAll(".seen")) token.classList.remove("seen", "compressed", "recent", "window");
    for (const { kind, first, last } of seen) {
      for (let n = first; n <= last; n++) this.span(n)?.classList.add("seen", kind);
    }
  }

  key(event) {
    if (event.altKey || event.metaKey) return;
    const first = this.start, last = this.start + this.pieces.length - 1;
    if (last < first) return;
    const now = this.chosen;
    const move = (n) => this.choose(Math.min(last, Math.max(first, n)));
    const keys = {
      ArrowLeft: () => move(now === null ? last : event.ctrlKey ? this.word(now, -1) : now - 1),
      ArrowRight: () => move(now === null ? first : event.ctrlKey ? this.word(now, 1) : now + 1),
      ArrowUp: () => move(now === null ? last : this.line(now, -1)),
      ArrowDown: () => move(now === null ? first : this.line(now, 1)),
      Home: () => move(first),
      End: () => move(last),
      Escape: () => this.app.chosen(this, null),
      Enter: () => this.app.act("look", this),
      " ": () => this.toggle(),
    };
    const acts = { r: "rewind", f: "fork", c: "compare", e: "edit" };
    if (keys[event.key] && (!event.ctrlKey || event.key.startsWith("Arrow"))) keys[event.key]();
    else if (acts[event.key] && !event.ctrlKey && now !== null) this.app.act(acts[event.key], this);
    else return;
    event.preventDefault();
  }

  word(n, step) {
    const space = (i) => /^\s*$/.test(this.pieces[i - this.start] ?? "");
    let i = n + step;
    while (i > this.start && i < this.start + this.pieces.length - 1 && (space(i) || !space(i - 1))) i += step;
    return i;
  }

  line(n, step) {
    const here = this.span(n);
    if (!here) return n;
    const { offsetTop: top, offsetLeft: left } = here;
    let found = n, line = null;
    for (let token = here; (token = step < 0 ? token.previousSibling : token.nextSibling);) {
      if (token.offsetTop === top || !token.textContent) continue;
      line ??= token.offsetTop;
      if (token.offsetTop !== line) break;
      found = Number(token.dataset.n);
      if (step < 0 ? token.offsetLeft <= left : token.offsetLeft >= left) break;
    }
    return found;
  }

  // Work that takes long.

  get busy() {
    return this.stopper !== null;
  }

  // Sends a change that the server answers with events; returns whether it was finished.
  async run(path, body, saying) {
    await this.stop();
    this.stopper = new AbortController();
    const began = performance.now();
    let written = 0;
    const heard = (name, data) => {
      if (name === "tokens") {
        written += data.pieces.length;
        if (this.start + this.pieces.length < data.start && this.pieces.length) this.length = data.start + data.pieces.length;
        this.add(data);
        this.strip.grow(this.length);
        this.find(".speed").textContent = `${Math.round((1000 * written) / (performance.now() - began))} tokens per second`;
      } else if (name === "memory") {
        this.strip.show(data);
      } else if (name === "progress") {
        this.progress(saying, data.done, data.total);
      }
    };
    this.find(".go").textContent = "Stop";
    this.root.setAttribute("aria-busy", "true");
    this.finished = (async () => {
      try {
        const done = await stream(path, body, heard, this.stopper.signal);
        this.summarise(done ?? (await get(`/api/texts/${this.id}`)));
        return done !== null;
      } catch (error) {
        this.app.problem(error);
        return false;
      } finally {
        this.stopper = null;
        this.find(".go").textContent = "Continue";
        this.find(".busy").hidden = true;
        this.root.removeAttribute("aria-busy");
        this.app.changed(this);
      }
    })();
    return this.finished;
  }

  progress(saying, done, total) {
    if (total < 200) return;
    const bar = this.find("progress");
    this.find(".busy").hidden = false;
    bar.max = total;
    bar.value = done;
    bar.setAttribute("aria-label", saying);
    this.find(".said").textContent = `${saying}: ${done.toLocaleString("en")} of ${total.toLocaleString("en")} tokens`;
  }

  async stop() {
    this.stopper?.abort();
    await this.finished;
  }

  async toggle() {
    if (this.busy) {
      await this.stop();
      this.app.say(`Stopped after ${this.length} tokens`);
    } else {
      await this.goOn();
    }
  }

  async goOn() {
    const number = (name) => Number(this.find(`.${name}`).value);
    const body = {
      tokens: number("count"), temperature: number("temperature"), top_p: number("top-p"), top_k: number("top-k"), seed: number("seed"),
    };
    if (this.start + this.pieces.length < this.length) await this.showEnd();
    this.app.say("Writing");
    const before = this.length;
    if (await this.run(`/api/texts/${this.id}/continue`, body, "Writing")) this.app.say(`${this.length - before} tokens written`);
    if (this.start + this.pieces.length < this.length) await this.showEnd(); // what was on its way when it was stopped
  }

  async rewind(length) {
    await this.stop();
    this.summarise(await post(`/api/texts/${this.id}/rewind`, { at: length }));
    await this.showEnd();
    this.app.changed(this);
    this.app.say(`Rewound to ${length} tokens`);
  }

  async resize() {
    const recent = Number(this.find(".recent-size").value), compressed = Number(this.find(".compressed-size").value);
    const again = this.find(".again").checked;
    const done = await this.run(`/api/texts/${this.id}/sizes`, { recent, compressed, again }, "Reading again");
    await this.showEnd();
    if (done) this.app.say(`Memory changed to ${recent} recent and ${compressed} compressed slots per layer`);
  }

  // Editing: from `at` on the text is replaced.

  async openEditor(at) {
    await this.stop();
    const form = this.find(".editor"), area = form.querySelector("textarea");
    form.hidden = true; // until it has the text that "Replace" would replace
    area.value = await this.piecesOf(at, this.length);
    this.editing = at;
    form.hidden = false;
    area.focus();
    this.app.say(`Editing from token ${at}, ${shown(await this.piecesOf(at, at + 1))}`);
  }

  closeEditor() {
    this.find(".editor").hidden = true;
    this.text.focus();
  }

  async replace() {
    const text = this.find(".editor textarea").value;
    this.closeEditor();
    if (await this.run(`/api/texts/${this.id}/edit`, { at: this.editing, text }, "Reading")) this.app.say("Replaced");
    await this.showEnd();
  }
}
