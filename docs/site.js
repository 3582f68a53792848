/* Short names, and options such as --help, are not broken after hyphens. In tables long names may be broken at joints. */
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
    const pieces = text.data.split(/((?<!\S)--?\w\S*)/).flatMap((part, i) => {
      if (i % 2 === 0) {
        const joints = inTable ? part.split(/(?<=[/._])(?!py\b|toml\b)(?=\w)/) : [part];
        return joints.flatMap((name, j) => (j ? [document.createElement("wbr"), name] : [name]));
      }
      const option = document.createElement("span");
      option.className = "whole";
      option.textContent = part;
      return [option];
    });
    if (pieces.length > 1) text.replaceWith(...pieces);
  }
}
