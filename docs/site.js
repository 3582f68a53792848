/* A number and its unit stay on one line, and so does a range such as (1.31 to 1.33). */
const whole = (text) => {
  const span = document.createElement("span");
  span.className = "whole";
  span.textContent = text;
  return span;
};
for (const cell of document.querySelectorAll(".md-typeset td")) {
  if (cell.textContent.length <= 12) {
    cell.classList.add("whole");
    continue;
  }
  for (const text of [...cell.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
    const pieces = text.data.split(/(\([^()]{1,10} to [^()]{1,10}\)(?: %)?)/);
    if (pieces.length > 1) text.replaceWith(...pieces.map((part, i) => (i % 2 ? whole(part) : part)));
  }
}
/* Tables of many columns are set tighter. Where a table has to scroll, its long texts get room. */
for (const table of document.querySelectorAll(".md-typeset table")) {
  const columns = table.rows[0].cells.length;
  if (columns >= 4) table.dataset.columns = columns >= 7 ? "many" : "some";
  for (const cell of columns >= 4 ? table.querySelectorAll("td") : []) {
    if (cell.textContent.length > 50) cell.classList.add("long");
  }
}

/* Short names, options such as --help, and numbers such as 3e-4 are not broken after hyphens. In tables long names may be broken at joints. */
for (const code of document.querySelectorAll(".md-typeset code")) {
  const inBlock = code.closest("pre") !== null;
  const inTable = code.closest("td") !== null && !inBlock;
  if (!inBlock && code.textContent.length <= 24) {
    code.classList.add("whole");
    continue;
  }
  const walk = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walk.nextNode()) texts.push(walk.currentNode);
  for (const text of texts) {
    const pieces = text.data.split(/((?<!\S)--?\w\S*|\b\d+e-\d+)/).flatMap((part, i) => {
      if (i % 2 === 0) {
        const joints = inTable ? part.split(/(?<=[/._])(?!\d|py\b|toml\b)(?=\w)/) : [part];
        return joints.flatMap((name, j) => (j ? [document.createElement("wbr"), name] : [name]));
      }
      return [whole(part)];
    });
    if (pieces.length > 1) text.replaceWith(...pieces);
  }
}
