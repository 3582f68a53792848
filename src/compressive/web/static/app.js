// The page: opens, shows and compares texts.

import { get, post, remove } from "./api.js";
import { Look } from "./look.js";
import { Pane } from "./pane.js";

const by = (id) => document.getElementById(id);
const EXAMPLE = "It was late in the afternoon when they came to the old house by the river. ";

class App {
  constructor(model) {
    this.model = model;
    this.panes = new Map(); // by the text's number
    this.left = this.right = null;
    this.look = new Look(by("look"), (name) => this.act(name, this.look.pane));
    this.asked = 0;
    this.describe();
    by("prompt").value = EXAMPLE;
    by("new").addEventListener("click", () => this.begin());
    by("start").addEventListener("submit", (event) => { event.preventDefault(); this.open(event.submitter?.value !== "only"); });
    by("file").addEventListener("change", async () => {
      const [file] = by("file").files;
      if (file) by("prompt").value = await file.text();
    });
    by("tabs").addEventListener("keydown", (event) => this.tabKey(event));
    by("beside").addEventListener("change", () => this.show(this.left, this.panes.get(Number(by("beside").value)) ?? null));
    by("close").addEventListener("click", () => this.guard(() => this.close(this.left)));
    by("both").addEventListener("click", () => this.both());
    by("help-open").addEventListener("click", () => by("help").showModal());
    by("help-close").addEventListener("click", () => by("help").close());
    document.addEventListener("keydown", (event) => {
      if (event.key === "?" && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) by("help").showModal();
    });
  }

  describe() {
    const { name, parameters, tokenizer, layers, heads, window, rates, device } = this.model;
    const rate = Math.min(...rates) === Math.max(...rates) ? rates[0] : `${Math.min(...rates)} to ${Math.max(...rates)}`;
    by("model").textContent =
      `${name} · ${parameters < 1e6 ? `${Math.round(parameters / 1e3)} thousand` : `${(parameters / 1e6).toFixed(1)} M`} parameters · ${tokenizer} · ${layers} layers, ${heads} heads · window ${window} · compression ${rate} to 1 · ${device}`;
    document.title = `${name} · compressive`;
  }

  say(text) {
    by("status").textContent = text;
    by("problem").hidden = true;
  }

  problem(error) {
    by("problem").textContent = error.message;
    by("problem").hidden = false;
  }

  async guard(work) {
    try {
      return await work();
    } catch (error) {
      this.problem(error);
      return undefined;
    }
  }

  // Texts.

  async restore() {
    for (const summary of await get("/api/texts")) await this.adopt(summary);
    const last = [...this.panes.values()].at(-1);
    if (last) this.show(last);
    else this.begin();
    by("new").disabled = false; // before, what it begins would be covered by the last text
  }

  async adopt(summary) {
    const pane = new Pane(this, summary);
    this.panes.set(pane.id, pane);
    if (pane.length) await pane.showEnd();
    return pane;
  }

  begin() {
    this.show(null);
    by("prompt").focus();
    by("prompt").select();
  }

  // Opens a text with the prompt of the form.
  open(goOn) {
    return this.guard(async () => {
      const pane = await this.adopt(await post("/api/texts", {}));
      this.show(pane);
      this.say("Reading the prompt");
      const read = await pane.run(`/api/texts/${pane.id}/edit`, { at: 0, text: by("prompt").value }, "Reading the prompt");
      if (!pane.length) { // refused, or stopped before its first window
        await remove(`/api/texts/${pane.id}`);
        this.panes.delete(pane.id);
        this.show(null);
        return;
      }
      await pane.showEnd();
      pane.text.focus();
      this.say(`${pane.length} tokens read`);
      if (read && goOn) await pane.goOn();
    });
  }

  async close(pane) {
    await pane.stop();
    await remove(`/api/texts/${pane.id}`);
    this.panes.delete(pane.id);
    const last = [...this.panes.values()].at(-1) ?? null;
    if (last) this.show(last);
    else this.begin();
    this.say(`Text ${pane.id} closed`);
  }

  show(left, right = null) {
    this.left = left;
    this.right = right === left ? null : right;
    const shown = [this.left, this.right].filter(Boolean);
    by("start").hidden = left !== null;
    by("panes").replaceChildren(...shown.map((pane) => pane.root));
    by("main").classList.toggle("comparing", this.right !== null);
    if (!shown.includes(this.look.pane)) this.look.hide();
    this.tabs();
    this.compare();
    for (const pane of shown) pane.text.scrollTop = pane.text.scrollHeight;
  }

  tabs() {
    const tabs = [...this.panes.values()].map((pane) => {
      const tab = document.createElement("button");
      tab.type = "button";
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-selected", String(pane === this.left));
      tab.tabIndex = pane === this.left ? 0 : -1;
      const title = pane.summary.title || "…";
      tab.textContent = `${pane.id} ${title.length > 18 ? `${title.slice(0, 17)}…` : title}`;
      tab.title = title;
      tab.addEventListener("click", () => { this.show(pane); pane.text.focus(); });
      return tab;
    });
    by("tabs").replaceChildren(...tabs);
    const options = [...this.panes.values()].filter((pane) => pane !== this.left).map((pane) => new Option(`text ${pane.id}`, pane.id, false, pane === this.right));
    by("beside").replaceChildren(new Option("nothing", "", false, this.right === null), ...options);
    by("beside").closest("label").hidden = options.length === 0 || this.left === null;
    by("close").hidden = this.left === null;
  }

  tabKey(event) {
    const tabs = [...by("tabs").children], now = tabs.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || now < 0) return;
    tabs[(now + step + tabs.length) % tabs.length].focus();
    event.preventDefault();
  }

  // Called by a pane whose text is another now.
  changed(pane) {
    if (this.look.pane === pane && pane.chosen !== null && pane.chosen >= pane.length) this.chosen(pane, null);
    this.tabs();
    this.compare();
  }

  async compare() {
    const line = by("compared");
    line.hidden = !(this.left?.length && this.right?.length);
    if (line.hidden) return;
    const asked = ++this.asked;
    await this.guard(async () => {
      const { common, bits } = await get(`/api/compare?a=${this.left.id}&b=${this.right.id}`);
      if (asked !== this.asked) return;
      const [a, b] = bits.map((value) => (value === null ? "–" : value.toFixed(3)));
      by("compared-text").textContent = `The first ${common.toLocaleString("en")} tokens are the same: ${a} bits per token on the left, ${b} on the right.`;
    });
  }

  both() {
    return Promise.all([this.left, this.right].map((pane) => pane.goOn()));
  }

  // A token was chosen, or none.

  chosen(pane, token) {
    for (const other of this.panes.values()) {
      other.underline([]);
      if (other !== pane || token === null) other.unmark();
    }
    const asked = (this.looked = Symbol("look")); // an answer to an earlier choice is no longer wanted
    if (token === null) {
      this.look.hide();
      return;
    }
    if (token === 0) {
      this.look.show(pane, 0, null);
      return;
    }
    this.guard(async () => {
      const seen = await get(`/api/texts/${pane.id}/look?token=${token}`);
      if (asked !== this.looked) return;
      this.look.show(pane, token, seen);
      pane.span(token)?.scrollIntoView({ block: "nearest" }); // the text may have become narrower
    });
  }

  act(name, pane) {
    const token = pane.chosen;
    if (token === null) return undefined;
    return this.guard(async () => {
      if (name === "look") by("look-title")?.focus();
      else if (name === "rewind") {
        await pane.rewind(token + 1);
        pane.text.focus();
      } else if (name === "edit") await pane.openEditor(token);
      else await this.fork(pane, token + 1, name === "compare");
    });
  }

  async fork(pane, length, beside) {
    const forked = await this.adopt(await post(`/api/texts/${pane.id}/fork`, { at: length }));
    for (const name of ["count", "temperature", "top-p", "top-k", "seed"]) {
      forked.find(`.${name}`).value = pane.find(`.${name}`).value;
    }
    for (const name of ["temperature", "top-p"]) forked.find(`.${name}-value`).textContent = forked.find(`.${name}`).value;
    forked.find(".seed").value = Number(pane.find(".seed").value) + 1; // or it would go on as the other did
    if (beside) this.show(pane, forked);
    else this.show(forked);
    this.say(`Text ${forked.id} forked from text ${pane.id} after ${length} tokens`);
    forked.text.focus();
  }
}

try {
  await new App(await get("/api/model")).restore();
} catch (error) {
  by("problem").textContent = error.message;
  by("problem").hidden = false;
}
