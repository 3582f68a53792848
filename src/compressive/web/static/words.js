// How tokens are written out where they stand alone.

export const shown = (text) => `“${text.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "part of a character"}”`;

// The same for a voice, which does not say white space.
export function spoken(text) {
  const names = { " ": "space", "\n": "new line", "\t": "tab", "": "part of a character" };
  return names[text] ?? text;
}

export const percent = (share) => (share < 0.0005 ? "0 %" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
export const bits = (value) => (value === null ? "not predicted" : `${value.toFixed(value < 10 ? 2 : 1)} bits`);
