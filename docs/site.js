/* A number such as 3e-4 stays on one line, a number and its unit, and so does a range such as (1.31 to 1.33). */
const whole = (text) => {
  const span = document.createElement("span");
  span.className = "whole";
  span.textContent = text;
  return span;
};
for (const block of document.querySelectorAll(".md-typeset :is(p, li)")) {
  const walk = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walk.nextNode()) if (!walk.currentNode.parentElement.closest("code, .whole")) texts.push(walk.currentNode);
  for (const text of texts) {
    text.data = text.data.replace(/(?<=\d) (?=%)| ?± (?=\d)/g, (gap) => gap.replaceAll(" ", "\u00a0"));
    const pieces = text.data.split(/(\b[\d.]+e-\d+)/);
    if (pieces.length > 1) text.replaceWith(...pieces.map((part, i) => (i % 2 ? whole(part) : part)));
  }
}
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
/* Tables of many columns are set tighter. Where a table has to scroll, its long texts get room; on a wide screen it is
   made to fit instead, and ranges may be broken. */
/* Parameters have their types and defaults in the signature above, too: a narrow screen leaves these columns out. */
for (const table of document.querySelectorAll(".md-typeset table")) {
  const columns = table.rows[0].cells.length;
  if (table.rows[0].textContent.replace(/\s+/g, " ").trim() === "Name Type Description Default") table.dataset.kind = "parameters";
  if (columns >= 4) table.dataset.columns = columns >= 7 ? "many" : "some";
  for (const cell of columns >= 4 ? table.querySelectorAll("td") : []) {
    if (cell.textContent.length > 50) cell.classList.add("long");
  }
  const frame = table.closest(".md-typeset__scrollwrap") ?? table;
  if (innerWidth > 960 && frame.scrollWidth > frame.clientWidth) table.dataset.fit = "tight";
}

/* Code that does not fit its line. It goes on below, further in than its own beginning. In commands an option and its
   value stay together. If a comment at the end of a line does not fit, all such comments of the block go above their commands. */
const wrap = (line, from, to) => {
  const range = document.createRange();
  const walk = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
  for (let at = 0; walk.nextNode(); at += walk.currentNode.length) {
    const text = walk.currentNode;
    if (from >= at && from < at + text.length) range.setStart(text, from - at);
    if (to > at && to <= at + text.length) range.setEnd(text, to - at);
  }
  const span = document.createElement("span");
  span.className = "whole";
  span.append(range.extractContents());
  range.insertNode(span);
};
const above = (line, comment) => {
  let first = line;
  while (first.previousElementSibling?.textContent.trimEnd().endsWith("\\")) first = first.previousElementSibling;
  for (let gap = comment.previousSibling; gap && !gap.textContent.trim(); gap = comment.previousSibling) gap.remove();
  const before = comment.previousSibling;
  if (before.nodeType === Node.TEXT_NODE) before.data = before.data.trimEnd();
  comment.classList.add("above");
  comment.style.setProperty("--indent", first.style.getPropertyValue("--indent"));
  comment.append("\n");
  first.before(comment);
};
for (const code of document.querySelectorAll(".highlight:not(.language-text, .language-console) pre > code")) {
  const lines = [...code.querySelectorAll(':scope > span[id^="__span"]')];
  if (!lines.length) continue;
  const style = getComputedStyle(code);
  const columns = Math.floor((code.clientWidth - 2 * parseFloat(style.paddingLeft)) / (0.603 * parseFloat(style.fontSize))) - 4;
  const comments = lines.map((line) => [...line.querySelectorAll(".c1")].at(-1));
  for (const [i, line] of lines.entries()) {
    const indent = line.textContent.search(/[^ ]/);
    if (indent > 0) line.style.setProperty("--indent", `${indent + 2}ch`);
    if (!code.closest(".language-sh")) continue;
    const command = line.textContent.slice(0, line.textContent.length - (comments[i]?.textContent.length ?? -1) - 1);
    const pairs = [...command.matchAll(/(?<=\s)--?[a-z][\w.-]* ("[^"]*"|'[^']*'|[^-\s]\S*)/g)];
    for (const pair of pairs.reverse()) {
      if (pair[0].length <= columns) wrap(line, pair.index, pair.index + pair[0].length);
    }
  }
  const ends = lines.map((line, i) => [line, comments[i]]).filter(([line, comment]) => comment && line.textContent.trim() !== comment.textContent.trim());
  const height = parseFloat(style.lineHeight);
  if (ends.some(([line]) => line.offsetHeight > 1.5 * height)) ends.forEach(([line, comment]) => above(line, comment));
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
        const joints = inTable ? part.split(/(?<=[/.])(?!\d|py\b|toml\b)(?=\w)|(?<=[a-z0-9]_)(?![\d_])(?=\w)/) : [part];
        return joints.flatMap((name, j) => (j ? [document.createElement("wbr"), name] : [name]));
      }
      return [whole(part)];
    });
    if (pieces.length > 1) text.replaceWith(...pieces);
  }
}
