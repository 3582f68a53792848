"""A drawing of what a layer attends to, with the sizes of one model: compressed memory, recent memory, window."""

import html

from compressive.config import ModelConfig
from compressive.plotting import COLOURS

WIDTH, LEFT, TOP, HEIGHT = 470, 8, 62, 44
LEAST = 84
"""Least width of a part, so that its name fits."""
CELLS = 16
"""Cells of a part, at most; more slots than that are drawn as groups."""


def sentence(config: ModelConfig, unit: str = "tokens") -> str:
    """Say in words what the drawing shows."""
    recent, compressed, rate = (max(sizes) for sizes in (config.memory_sizes, config.compressed_sizes, _rates(config)))
    varies = " (the largest layer; others have less)" if _varies(config) else ""
    layers = "The only layer" if config.n_layers == 1 else f"Each of the {config.n_layers} layers"
    text = f"{layers} attends to a window of {config.window:,} {unit}"
    if recent:
        text += f" and to recent memory, its hidden states of the {recent:,} {unit} before that{varies}"
    if compressed:
        text += (
            f". What falls out of recent memory is not lost: every {rate:,} old states become one slot of compressed "
            f"memory, by {NAMES[config.compression]}, and {compressed:,} such slots reach {compressed * rate:,} {unit} "
            f"further back for {compressed:,} more keys"
        )
    text += f". One layer reaches {config.memory_span:,} {unit} back before the window"
    return f"{text}; all layers together, {config.temporal_range:,}." if config.n_layers > 1 else f"{text}."


NAMES = {
    "max": "their maximum", "mean": "their mean", "conv": "a learned convolution", "dilated": "dilated convolutions",
    "most_used": "keeping the most attended one", "gru": "a learned GRU", "attention": "learned attention",
}  # fmt: skip


def memory_drawing(config: ModelConfig, unit: str = "tokens") -> str:
    """Return the drawing as an SVG element, oldest on the left; memories that the model lacks are left out."""
    rate = max(_rates(config))
    sizes = {"compressed": max(config.compressed_sizes), "recent": max(config.memory_sizes), "window": config.window}
    sizes = {place: size for place, size in sizes.items() if size}
    total, room = sum(sizes.values()), WIDTH - 2 * LEFT - 26 * (len(sizes) - 1)
    free = room - LEAST * len(sizes)
    x, parts, arrows, centres = float(LEFT), [], [], {}
    for place, size in sizes.items():
        width = LEAST + free * size / total
        parts.append(_part(place, size, x, width, rate if place == "compressed" else 1, unit))
        centres[place] = (x, x + width)
        x += width + 26
    if "recent" in sizes:
        arrows.append(_arrow(centres["window"][0], centres["recent"][1], "each window moves on"))
    if "compressed" in sizes:
        how = f"{rate} become 1"
        arrows.append(_arrow(centres["recent"][0], centres["compressed"][1], how))
    oldest = next(iter(sizes))
    forgotten = f'<text x="{LEFT}" y="{TOP - 14}" class="small">← the oldest is forgotten</text>'
    attends = (
        f'<path class="line" d="M{LEFT} {TOP + HEIGHT + 40} v6 H{WIDTH - LEFT} v-6"/>'
        f'<text x="{WIDTH / 2}" y="{TOP + HEIGHT + 62}" text-anchor="middle">a layer attends to all of it: '
        f"{total:,} keys, {sum(size * (rate if place == 'compressed' else 1) for place, size in sizes.items()):,} "
        f"{unit} back</text>"
    )
    label = html.escape(sentence(config, unit))
    return (
        f'<div class="drawing"><svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 72}">'
        f"{''.join(parts)}{''.join(arrows)}{forgotten if oldest != 'window' else ''}{attends}</svg></div>"
    )


def _part(place: str, size: int, x: float, width: float, rate: int, unit: str) -> str:
    """Return one memory: its cells, its name above, what it holds below."""
    colour = COLOURS[place]
    fill = f"var(--c{colour[1:]}, {colour})"
    count = min(size, CELLS)
    step = width / count
    cells = "".join(
        f'<rect x="{x + i * step:.1f}" y="{TOP}" width="{max(step - 1.5, 0.5):.1f}" height="{HEIGHT}" rx="1.5" '
        f'fill="{fill}" opacity="{0.45 + 0.5 * i / max(count - 1, 1):.2f}"/>'
        for i in range(count)
    )
    name = "window" if place == "window" else f"{place} memory"
    slots = f"{size:,} {'slots' if place == 'compressed' else unit}"
    reach = f"= {size * rate:,} {unit}" if rate > 1 else ""
    middle = x + width / 2
    title = f"{name}: {slots} {reach}".strip()
    return (
        f"<g><title>{title}</title>{cells}"
        f'<text class="strong" x="{middle:.1f}" y="{TOP + HEIGHT + 15}" text-anchor="middle" style="fill: {fill}">'
        f"{name}</text>"
        f'<text x="{middle:.1f}" y="{TOP + HEIGHT + 29}" text-anchor="middle">{slots} {reach}</text></g>'
    )


def _arrow(start: float, end: float, text: str) -> str:
    """Return an arc with an arrow head from one part to the one left of it, with a text above."""
    a, b, y = start + 10, end - 10, TOP - 4
    middle = (a + b) / 2
    return (
        f'<path class="line" d="M{a:.1f} {y} C{a:.1f} {y - 26} {b:.1f} {y - 26} {b:.1f} {y}"/>'
        f'<path class="line" d="M{b - 4:.1f} {y - 6} L{b:.1f} {y} L{b + 4:.1f} {y - 6}"/>'
        f'<text x="{middle:.1f}" y="{y - 26}" text-anchor="middle">{html.escape(text)}</text>'
    )


def _rates(config: ModelConfig) -> tuple[int, ...]:
    return tuple(r for r, size in zip(config.compression_rates, config.compressed_sizes, strict=True) if size) or (1,)


def _varies(config: ModelConfig) -> bool:
    return any(len(set(sizes)) > 1 for sizes in (config.memory_sizes, config.compressed_sizes))
