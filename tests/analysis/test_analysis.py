"""Analyses against values computed by hand: hidden memories, full memories, attention by bucket."""

import dataclasses
import json
import math
import re
from io import BytesIO, StringIO
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers import build, random_tokens, run_windows, tiny_config, windows_of

from compressive.analysis.attention import measure_attention, watch_attention
from compressive.analysis.curves import Curves
from compressive.analysis.layers import measurable, measure_layers
from compressive.analysis.memory import EVERYTHING, NO_COMPRESSED, NOTHING, hide, measure_memory
from compressive.analysis.reading import Estimate, spread, tokens_to_fill
from compressive.analysis.xz import xz_bits, xz_bits_after
from compressive.plotting import inline_svg

SIZES: dict[str, Any] = {"tokens": 300, "streams": 4}


def random_text(config, length, seed=0):
    return np.random.default_rng(seed).integers(config.vocab_size, size=length).astype(np.uint16)


def nats_by_hand(model, cut, before=lambda memory: memory):
    """Return -log p of every token of the streams, (B, n·T)."""
    memory, found = model.initial_memory(len(cut.tokens)), []
    with torch.no_grad():
        for start in range(0, cut.windows * cut.window, cut.window):
            x, y = (cut.tokens[:, start + shift : start + shift + cut.window] for shift in (0, 1))
            out = model(x, before(memory), targets=y)
            memory = out.memory
            found.append(out.nll)
    return torch.cat(found, dim=1).numpy()


def test_an_estimate_is_mean_and_standard_error():
    found = Estimate.of(np.array([1.0, 2.0, 6.0]))
    assert found.mean == 3
    assert found.error == pytest.approx(math.sqrt(7) / math.sqrt(3))


def test_streams_are_spread_over_the_text_and_fill_their_memory_first():
    config = tiny_config()
    text = random_text(config, 1000)
    cut = spread(build(config), text, tokens=160, streams=4)
    assert cut.filling == tokens_to_fill(config) // 4
    assert cut.windows == cut.filling + 10
    for stream, row in enumerate(cut.tokens):
        np.testing.assert_array_equal(row, text[stream * 250 :][: cut.windows * 4 + 1])


def test_a_short_text_is_read_in_fewer_streams_and_a_shorter_one_refused():
    model = build(tiny_config())  # memories are full after four windows of four
    text = random_text(model.config, 130)
    assert len(spread(model, text, tokens=10_000, streams=16).tokens) == 2
    with pytest.raises(ValueError, match="a text of 40 tokens: expected at least 50"):
        spread(model, text[:40], tokens=100, streams=16)
    assert spread(model, text[:50], tokens=100, streams=16).windows == 6
    with pytest.raises(ValueError, match="streams=1"):
        spread(model, text, tokens=100, streams=1)


@pytest.mark.parametrize(
    "sizes",
    [(6, 3, 2, 4), (4, 2, 4, 4), (9, 5, 3, 4), (2, 7, 1, 4), ((2, 6), (0, 3), (1, 2), 4), (6, 0, 2, 4), (0, 0, 1, 3)],
)
@pytest.mark.filterwarnings("ignore:window=4 is not a multiple")
def test_tokens_to_fill_leave_no_slot_empty(sizes):
    recent, compressed, rate, window = sizes
    config = tiny_config(
        memory_size=recent, compressed_size=compressed, compression_rate=rate, window=window, empty_memory="masked"
    )
    model, memory = build(config), None
    full = [True] if not any((*config.memory_sizes, *config.compressed_sizes)) else [False]
    for tokens in windows_of(random_tokens(config, 1, 20 * window), window):
        memory = model(tokens, memory or model.initial_memory(1)).memory
        full.append(all(layer.valid().all() for layer in memory.layers))
    filled = tokens_to_fill(config) // config.window
    assert all(full[filled:])
    assert not any(full[: max(0, filled - 1)])  # at most one window more than needed


@pytest.mark.parametrize("values", [{}, {"compression": "most_used"}, {"compressed_size": (0, 3)}])
def test_losses_with_memories_hidden(values):
    config = tiny_config(**values)
    model, text = build(config), random_text(config, 2000)
    found = measure_memory(model, text, **SIZES)
    cut = spread(model, text, **SIZES)
    count, nats = len(cut.tokens), {}
    no, yes = torch.zeros(count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
    for name, flags in {EVERYTHING: (no, no), NO_COMPRESSED: (yes, no), NOTHING: (yes, yes)}.items():
        nats[name] = nats_by_hand(model, cut, lambda memory, flags=flags: hide(memory, *flags))
    streams = {name: rows[:, cut.filling * 4 :].mean(axis=1) / math.log(2) for name, rows in nats.items()}
    for name, want in streams.items():
        assert found.conditions[name].mean == pytest.approx(want.mean(), abs=1e-9)
        assert found.conditions[name].error == pytest.approx(want.std(ddof=1) / 2, abs=1e-9)
    assert found.compressed_worth is not None
    assert found.recent_worth is not None
    worth = streams[NO_COMPRESSED] - streams[EVERYTHING]
    assert found.compressed_worth.mean == pytest.approx(worth.mean(), abs=1e-9)
    assert found.compressed_worth.error == pytest.approx(worth.std(ddof=1) / 2, abs=1e-9)
    assert found.recent_worth.mean == pytest.approx((streams[NOTHING] - streams[NO_COMPRESSED]).mean(), abs=1e-9)
    assert found.tokens == streams[EVERYTHING].size * (cut.windows - cut.filling) * 4


def test_with_all_memory_hidden_every_window_stands_alone():
    config = tiny_config()
    model, text = build(config), random_text(config, 2000)
    found = measure_memory(model, text, **SIZES)
    bare = build(dataclasses.replace(config, memory_size=0, compressed_size=0, empty_memory="masked"))
    bare.load_state_dict({name: w for name, w in model.state_dict().items() if "compress" not in name})
    cut = spread(model, text, **SIZES)
    alone = nats_by_hand(bare, cut)[:, cut.filling * 4 :] / math.log(2)
    assert found.conditions[NOTHING].mean == pytest.approx(alone.mean(), abs=1e-9)


@pytest.mark.parametrize("empty_memory", ["zeros", "masked"])
def test_the_loss_since_an_empty_memory_converges_to_that_of_a_full_one(empty_memory):
    config = tiny_config(empty_memory=empty_memory)  # reaches back 2 × (6 + 2·3) = 24 tokens
    model, text = build(config), random_text(config, 2000)
    rows = measure_memory(model, text, **SIZES).since_empty
    assert [(row.first, row.last) for row in rows] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 28)]
    assert all(abs(row.excess.mean) > 1e-4 for row in rows)
    beyond = measure_memory(model, text, tokens=2000, streams=2)  # up to the temporal range
    assert beyond.since_empty[-1].last == 28
    # The last window is beyond the temporal range of earlier text; computed by hand for one start.
    cut = spread(model, text, tokens=2000, streams=2)
    full = nats_by_hand(model, cut)
    start = (cut.filling + 3) * 4
    fresh = nats_by_hand(model, cut._replace(tokens=cut.tokens[:, start : start + 33]))
    np.testing.assert_allclose(fresh[:, 28:], full[:, start + 28 : start + 32], atol=1e-9)


def test_the_excess_is_that_over_the_same_tokens_with_full_memories():
    config = tiny_config(empty_memory="masked")
    model, text = build(config), random_text(config, 60)
    found = measure_memory(model, text, tokens=100, streams=2)  # few possible starts: all are used
    cut = spread(model, text, tokens=100, streams=2)
    full, reach = nats_by_hand(model, cut), found.since_empty[-1].last

    def excess(count, begin, end):
        """Of tokens from `begin` to `end` of starts that so many windows follow, every such start."""
        places = [(stream, k * 4) for stream in range(2) for k in range(cut.filling, cut.windows - count + 1)]
        found = []
        for stream, start in places:
            rows = cut.tokens[stream : stream + 1, start : start + 4 * count + 1]
            fresh = nats_by_hand(model, cut._replace(tokens=rows))
            found.append((fresh[0, begin:end] - full[stream, start + begin : start + end]).mean() / math.log(2))
        return found

    last = found.since_empty[-1]
    assert last.first > 4  # beyond the first window
    first, whole = excess(1, 0, 1), excess(reach // 4, last.first - 1, reach)
    assert len(first) > len(whole)
    assert (found.first_windows, found.starts) == (len(first), len(whole))
    assert found.since_empty[0].excess.mean == pytest.approx(np.mean(first), abs=1e-9)
    assert found.since_empty[0].excess.error == pytest.approx(np.std(first, ddof=1) / math.sqrt(len(first)), abs=1e-9)
    assert last.excess.mean == pytest.approx(np.mean(whole), abs=1e-9)


def test_a_transformer_xl_has_recent_memory_alone():
    config = tiny_config(compressed_size=0)
    model, text = build(config), random_text(config, 2000)
    found = measure_memory(model, text, **SIZES)
    assert list(found.conditions) == [EVERYTHING, NOTHING]
    assert found.compressed_worth is None
    attention = measure_attention(model, text, **SIZES)
    assert {bucket.place for bucket in attention.buckets} == {"recent", "window"}
    with pytest.raises(ValueError, match="compressed_size=0"):
        measure_layers(model, text, **SIZES)


SEPARATE = {"norm": "pre", "compressed_positions": "separate"}


@pytest.mark.parametrize("values", [{}, {"compression": "most_used"}, SEPARATE])
def test_attention_is_that_of_the_layers_and_watching_changes_nothing(values):
    config = tiny_config(window=7, memory_size=13, compressed_size=8, compression_rate=7, **values)
    model, text = build(config), random_text(config, 3000)
    tokens = torch.from_numpy(text[:70].astype(np.int64))[None]
    with torch.no_grad():
        want = list(run_windows(model, windows_of(tokens, 7), model.initial_memory(1)))
        with watch_attention(model) as usages:
            got = list(run_windows(model, windows_of(tokens, 7), model.initial_memory(1)))
    assert len(usages) == 2 * 10
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.logits, b.logits)
        for one, other in zip(a.memory.layers, b.memory.layers, strict=True):
            assert (one.usage is None and other.usage is None) or torch.equal(one.usage, other.usage)
    assert all(usage.shape == (1, 28) for usage in usages)

    found = measure_attention(model, text, **SIZES)
    assert sum(share.mean for share in found.shares) == pytest.approx(1)
    assert all(sum(share.mean for share in layer) == pytest.approx(1) for layer in found.by_layer)
    assert [bucket.slots for bucket in found.buckets] == pytest.approx([8 / 6] * 6 + [13 / 6] * 6 + [7 / 6] * 6)
    assert sum(map(found.share, ("compressed", "recent", "window"))) == pytest.approx(1)

    cut, by_hand = spread(model, text, **SIZES), []
    with watch_attention(model) as usages:
        nats_by_hand(model, cut)
    for window in range(cut.filling, cut.windows):
        mean = (usages[2 * window] + usages[2 * window + 1]) / 2
        by_hand.append(mean[:, 21] + mean[:, 22] / 6)  # seven slots in six buckets: the first has 7/6
    values = torch.cat(by_hand).numpy()
    assert found.sequences == len(values)
    assert found.shares[12].mean == pytest.approx(values.mean())
    assert found.shares[12].error == pytest.approx(values.std(ddof=1) / math.sqrt(len(values)))


def test_attention_weights_by_hand():
    """One head, no positions, all keys zero: every query attends uniformly."""
    config = tiny_config(n_heads=1, empty_memory="masked", memory_size=8)
    model = build(config)
    with torch.no_grad():
        for layer in model.trunk.layers:
            layer.attention.key_value.weight[: config.d_model] = 0
            layer.attention.relative.weight.zero_()
    found = measure_attention(model, random_text(config, 2000), **SIZES)
    # The query at t sees 3 + 8 memories and t + 1 of the window.
    each = np.mean([1 / (11 + t + 1) for t in range(4)])
    assert found.share("compressed") == pytest.approx(3 * each)
    assert found.share("recent") == pytest.approx(8 * each)


def test_a_layer_without_a_memory_gives_it_no_attention():
    config = tiny_config(compressed_size=(0, 3))
    found = measure_attention(build(config), random_text(config, 2000), **SIZES)
    assert [bucket.place for bucket in found.buckets] == ["compressed"] * 6 + ["recent"] * 6 + ["window"] * 6
    assert [share.mean for share in found.by_layer[0][:6]] == [0] * 6
    assert found.by_layer[1][0].mean == pytest.approx(found.by_layer[1][1].mean)  # two halves of one slot


@pytest.mark.parametrize("kind", ["attention", "autoencoding"])
def test_compression_loss_by_layer(kind):
    config = tiny_config(n_layers=3, compressed_size=(3, 0, 3), compression_loss=kind)
    model, text = build(config), random_text(config, 2000)
    found = measure_layers(model, text, **SIZES)
    cut = spread(model, text, **SIZES)
    with torch.no_grad():
        outs = list(run_windows(model, windows_of(cut.tokens[:, :-1], 4), model.initial_memory(4)))
    losses = torch.stack([out.compression_losses for out in outs[cut.filling :]]).numpy()
    assert list(found.layers) == [1, 3]
    assert found.windows == len(losses)
    assert found.layers[3].mean == pytest.approx(losses[:, 2].mean())
    assert found.layers[3].error == pytest.approx(losses[:, 2].std(ddof=1) / math.sqrt(len(losses)))


def test_a_model_without_a_loss_is_measured_by_attention_reconstruction():
    config = tiny_config(compression_loss="none")
    model, text = build(config), random_text(config, 500)
    with pytest.raises(ValueError, match="compression_loss='none'"):
        measure_layers(model, text, **SIZES)
    other = build(measurable(config))
    other.load_state_dict(model.state_dict())
    assert measure_layers(other, text, **SIZES).layers[1].mean > 0
    assert measurable(tiny_config()) == tiny_config()


def test_measuring_does_not_change_the_model():
    config = tiny_config(dropout=0.5)
    model, text = build(config), random_text(config, 500)
    want = [measure(model, text, **SIZES) for measure in (measure_memory, measure_attention, measure_layers)]
    model.train()
    state = torch.get_rng_state()
    got = [measure(model, text, **SIZES) for measure in (measure_memory, measure_attention, measure_layers)]
    assert got == want  # no dropout
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_progress_goes_from_nothing_to_all():
    config = tiny_config()
    model, text = build(config), random_text(config, 500)
    for measure in (measure_memory, measure_attention, measure_layers):
        calls: list[float] = []

        def progress(done, total, calls=calls):
            calls.append(done / total)

        measure(model, text, progress=progress, **SIZES)
        assert calls == sorted(calls)
        assert calls[-1] == 1


@pytest.mark.parametrize("sizes", [(0, 0), (6, 0), ((6, 0), (3, 0))])
def test_figures_leave_out_missing_memories(sizes):
    pytest.importorskip("matplotlib")
    config = tiny_config(memory_size=sizes[0], compressed_size=sizes[1])
    model, text = build(config), random_text(config, 500)
    for measure in (measure_memory, measure_attention):
        measure(model, text, **SIZES).plot(png := BytesIO())
        assert png.getvalue().startswith(b"\x89PNG")


def test_results_are_tables_figures_and_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    from rich.console import Console

    config = tiny_config()
    model, text = build(config), random_text(config, 500)
    for measure in (measure_memory, measure_attention, measure_layers):
        found = measure(model, text, **SIZES)
        shown = StringIO()
        Console(width=100, file=shown).print(found.table())
        assert "±" in shown.getvalue() or "standard error" in shown.getvalue()
        path = tmp_path / "deeper" / f"{measure.__name__}.png"
        found.plot(path)
        assert path.read_bytes().startswith(b"\x89PNG")
        json.dumps(dataclasses.asdict(found), allow_nan=False)


@pytest.mark.parametrize("value", [None, 0.0, 1.0])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_curves_are_plotted_from_any_metrics(value, count):
    pytest.importorskip("matplotlib")
    names = ("bits", "compression_loss", "gradient_norm", "compressor_gradient_norm", "learning_rate", "seconds")
    lines = [{"step": step, **dict.fromkeys(names, value)} for step in range(count)]
    for panel in (*Curves(lines, lines[:2], []).loss_panels(), *Curves(lines, [], []).optimisation_panels()):
        drawn = inline_svg(panel)
        assert drawn.startswith("<svg ")
        assert "nan" not in drawn


def test_points_that_an_axis_cannot_show_are_said():
    pytest.importorskip("matplotlib")
    values = [99.0, *np.linspace(3, 2, 80).tolist()]
    lines: list[dict[str, Any]] = [{"step": step, "bits": value} for step, value in enumerate(values)]
    lines += [{"step": 100, "gradient_norm": 0.0}, {"step": 101, "gradient_norm": 2.0}, {"step": 102, "bits": None}]
    curves = Curves(lines, [], [])
    (loss,), (norm, *_) = curves.loss_panels(chance=8.0), curves.optimisation_panels()
    assert loss.caption.endswith("The point at step 0 is outside the axis, up to 99.")
    assert "Uniform guessing has 8. The point at step 102 is not finite, and not drawn." in loss.caption
    assert norm.caption == "The point at step 100 is 0 or below, which a logarithmic axis cannot show."


def test_hover_shows_values_and_colours_are_variables():
    pytest.importorskip("matplotlib")
    lines = [{"step": step, "bits": 8 / (step + 1)} for step in range(300)]
    (panel,) = Curves(lines, lines[::100], []).loss_panels()
    drawn = inline_svg(panel)
    tips = re.findall("<title>(.*?)</title>", drawn)
    assert len([tip for tip in tips if tip.startswith("training")]) <= 60
    assert "validation, step 200: 0.0398 bits per token" in tips
    assert "var(--ink, #33393f)" in drawn
    assert "http" not in drawn
    assert ElementTree.fromstring(re.sub(r"xlink:", "", drawn)).tag == "svg"


def test_xz_after_the_training_text_is_cheaper():
    words = np.random.default_rng(0).integers(97, 123, (50, 6)).astype(np.uint8)
    train, test = (words[np.random.default_rng(i).integers(50, size=500)].tobytes() for i in (1, 2))
    assert 0 < xz_bits_after(test, train) < xz_bits(test) < 8
    assert xz_bits_after(test, test + train) < 0.5
