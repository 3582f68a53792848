// Shows titles at once, and on touch; without this script browsers show them on hover, after a while.
const tip = Object.assign(document.createElement("div"), { id: "tip", hidden: true });
document.body.append(tip);

function show(event) {
  const target = event.target instanceof Element ? event.target : document.body;
  const found = target.closest("[title], [data-tip], g:has(> title), rect:has(> title)");
  tip.hidden = !found;
  if (!found) return;
  const own = found.querySelector(":scope > title");
  if (own) {
    found.dataset.tip = own.textContent;
    own.remove();
  }
  if (found.title) {
    found.dataset.tip = found.title;
    found.removeAttribute("title");
  }
  tip.textContent = found.dataset.tip;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  const below = event.clientY < innerHeight - 60;
  tip.style.top = `${below ? event.clientY + 16 : event.clientY - tip.offsetHeight - 12}px`;
}

for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, show);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
