"""What the trunk promises: causality, reach, documents kept apart, memory that stays small, compilation."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers import (
    COMPRESSIONS,
    WITH_A_LOSS,
    build,
    live_bytes,
    only_new_objects,
    random_tokens,
    run_windows,
    tiny_config,
    windows_of,
)

from compressive import CompressiveLM, CompressiveTransformer, ModelConfig
from compressive.config.checks import warn_once


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def compiler():
    """Forgets what other tests compiled, so that no limit on versions of one function is hit."""
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


def logits_of(model, tokens, starts=None, memory=None):
    memory = model.initial_memory(len(tokens)) if memory is None else memory
    size = model.config.window
    return [out.logits for out in run_windows(model, windows_of(tokens, size), memory, starts)]


@pytest.mark.parametrize("sizes", [(6, 5), (4, 4), (2, 9)])
def test_mean_pooling_at_rate_one_is_a_larger_transformer_xl(sizes):
    recent, compressed = sizes
    model = build(tiny_config(compression="mean", compression_rate=1, memory_size=recent, compressed_size=compressed))
    twin = build(tiny_config(memory_size=recent + compressed, compressed_size=0))
    twin.load_state_dict(model.state_dict())
    tokens = random_tokens(model.config, 2, 8 * 4 + 3)
    for got, want in zip(logits_of(model, tokens), logits_of(twin, tokens), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_future_has_no_influence(compression):
    config = tiny_config(compression=compression)
    model = build(config)
    tokens = random_tokens(config, 1, 5 * 4)
    before = torch.cat(logits_of(model, tokens), dim=1)
    for t in (0, 6, 13, 19):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % config.vocab_size
        after = torch.cat(logits_of(model, changed), dim=1)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t], after[:, t])


@pytest.mark.parametrize(
    ("n_layers", "recent", "compressed", "rate"),
    [(1, 4, 2, 2), (2, 4, 2, 2), (2, 2, 4, 1), (3, 2, 1, 2), (2, 6, 0, 1)],
)
@pytest.mark.parametrize("position", [0, 1])
def test_reach_is_the_paper_s_temporal_range(n_layers, recent, compressed, rate, position):
    window = 2
    config = tiny_config(
        n_layers=n_layers, window=window, memory_size=recent, compressed_size=compressed,
        compression_rate=rate, compression="mean",
    )  # fmt: skip
    reach = n_layers * (recent + rate * compressed) // window
    assert reach == config.temporal_range // window
    model, w = build(config), 2
    tokens = random_tokens(config, 1, (w + reach + 4) * window)
    changed = tokens.clone()
    changed[0, w * window + position] = (changed[0, w * window + position] + 1) % config.vocab_size
    differs = [not torch.equal(a, b) for a, b in zip(logits_of(model, tokens), logits_of(model, changed), strict=True)]
    assert differs == [False] * w + [True] * (reach + 1) + [False] * 3


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("sizes", [(6, 3, 2), (8, 4, 4), (3, 3, 2), (4, 6, 1)])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_start_inside_a_window_is_a_fresh_memory_with_empty_slots_masked(compression, sizes, norm):
    recent, compressed, rate = sizes
    config = tiny_config(
        compression=compression, memory_size=recent, compressed_size=compressed, compression_rate=rate, norm=norm
    )
    model = build(config)
    fresh = build(dataclasses.replace(config, empty_memory="masked"))
    text = random_tokens(config, 1, 8 * 4)
    for start in (8, 9, 10, 11):  # at a window's first position, in its middle, at its last
        starts = torch.zeros_like(text, dtype=torch.bool)
        starts[0, start] = True
        starts[0, 5] = True  # an earlier document, of which nothing may be left either
        got = torch.cat(logits_of(model, text, windows_of(starts, 4)), dim=1)[:, start:]
        head = (4 - start % 4) % 4 or 4
        windows = [text[:, start : start + head], *windows_of(text[:, start + head :], 4)]
        outs = run_windows(fresh, windows, fresh.initial_memory(1))
        torch.testing.assert_close(got, torch.cat([out.logits for out in outs], dim=1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("compression", "loss"), WITH_A_LOSS)
def test_partial_slots_keep_nothing_from_before_a_start_and_more_from_after(compression, loss):
    sizes: dict[str, Any] = {"memory_size": 4, "compressed_size": 3, "compression_rate": 4}
    config = tiny_config(compression=compression, compression_loss=loss, spanning_slots="partial", **sizes)
    model = build(config)
    text, start = random_tokens(config, 1, 6 * 4), 6  # one group of the window's four spans it
    starts = torch.zeros_like(text, dtype=torch.bool)
    starts[0, start] = True
    other = text.clone()
    other[0, :start] = (other[0, :start] + 1) % config.vocab_size

    def after(model, tokens):
        outs = list(run_windows(model, windows_of(tokens, 4), model.initial_memory(1), windows_of(starts, 4)))
        # The window with the start itself has no compression loss.
        return torch.cat([out.logits for out in outs], dim=1)[:, start:], [out.compression_loss for out in outs[2:]]

    got, losses = after(model, text)
    again, same_losses = after(model, other)
    torch.testing.assert_close(again, got, rtol=0, atol=1e-12)
    torch.testing.assert_close(same_losses, losses)
    hidden, _ = after(build(dataclasses.replace(config, spanning_slots="hidden")), text)
    first_with_the_slot = 3 * 4 - start  # pushed out of recent memory by the window before
    assert torch.equal(got[:, :first_with_the_slot], hidden[:, :first_with_the_slot])
    spanned = compression != "most_used"  # which takes single slots
    assert torch.isclose(got, hidden).all(dim=2)[:, first_with_the_slot:].all() == (not spanned)


def test_starts_concern_their_own_row_only():
    config = tiny_config()
    model, tokens = build(config), random_tokens(config, 2, 16)
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[1, 6] = True
    with_starts = torch.cat(logits_of(model, tokens, windows_of(starts, 4)), dim=1)
    without = torch.cat(logits_of(model, tokens), dim=1)
    torch.testing.assert_close(with_starts[0], without[0])
    torch.testing.assert_close(with_starts[1, :6], without[1, :6])
    assert not torch.isclose(with_starts[1, 6:], without[1, 6:]).all(dim=1).any()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_larger_memories_change_nothing_until_the_smaller_ones_have_filled(compression):
    config = tiny_config(empty_memory="masked", memory_size=8, compressed_size=4, compression=compression)
    model = build(config)
    larger = build(dataclasses.replace(config, compressed_size=40))
    larger.load_state_dict(model.state_dict())
    assert [p.shape for p in larger.state_dict().values()] == [p.shape for p in model.state_dict().values()]
    tokens = random_tokens(config, 2, 8 * 4)
    same = [
        torch.allclose(a, b, rtol=0, atol=1e-12)
        for a, b in zip(logits_of(model, tokens), logits_of(larger, tokens), strict=True)
    ]
    # Two windows fill recent memory, two more the four compressed slots; the fifth still sees all of it.
    assert same == [True] * 5 + [False] * 3


def test_a_memory_resized_in_mid_text_goes_on():
    config = tiny_config(empty_memory="masked", memory_size=8, compressed_size=4)
    model, larger = build(config), build(dataclasses.replace(config, compressed_size=9, memory_size=11))
    larger.load_state_dict(model.state_dict())
    *_, last = run_windows(model, windows_of(random_tokens(config, 2, 24), 4), model.initial_memory(2))
    tokens = random_tokens(config, 2, 4, seed=5)
    # A larger recent memory only opens gaps between the memories, so compare with empty slots at the far end.
    wider = build(dataclasses.replace(config, compressed_size=9))
    wider.load_state_dict(model.state_dict())
    got = wider(tokens, last.memory.resize(compressed_size=9)).logits
    torch.testing.assert_close(got, model(tokens, last.memory).logits)
    assert larger(tokens, last.memory.resize(11, 9)).logits.isfinite().all()


def test_trunk_takes_and_gives_activations():
    config = tiny_config(norm="pre")
    trunk = CompressiveTransformer(config)
    out = trunk(torch.randn(3, 4, 8), trunk.initial_memory(3))
    assert out.hidden.shape == (3, 4, 8)
    assert out.compression_losses.shape == (2,)
    torch.testing.assert_close(out.compression_loss, out.compression_losses.sum())


@pytest.mark.parametrize(
    ("x", "starts", "message"),
    [
        (torch.zeros(2, 4, 9), None, r"input of shape \(2, 4, 9\): expected \(batch, time, d_model=8\)"),
        (torch.zeros(2, 8), None, r"input of shape \(2, 8\): expected \(batch, time"),
        (torch.zeros(2, 5, 8), None, r"time=5: expected 1 to window=4; cut the text into windows"),
        (torch.zeros(2, 0, 8), None, r"time=0: expected 1 to window=4"),
        (torch.zeros(2, 4, 8), torch.zeros(2, 4), r"starts of type torch.float32 .*: expected a bool mask"),
        (torch.zeros(2, 4, 8), torch.zeros(2, 3).bool(), r"starts of .* shape \(2, 3\): .* = \(2, 4\)"),
    ],
)
def test_bad_input_is_refused(x, starts, message):
    trunk = CompressiveTransformer(tiny_config())
    with pytest.raises(ValueError, match=message):
        trunk(x, trunk.initial_memory(2), starts)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["conv", "most_used"])
@only_new_objects()
def test_no_attention_map_or_history_outlives_a_step(compression):
    before = live_bytes()
    config = tiny_config(compression=compression, window=16, memory_size=16, compressed_size=16)
    model = build(config, dtype=torch.float32).train()
    memory, seen = model.initial_memory(4), []
    tokens = random_tokens(config, 4, 16)
    with torch.enable_grad():
        for _ in range(20):
            out = model(tokens, memory, targets=tokens)
            (out.nll.mean() + out.compression_loss).backward()
            memory = out.memory
            model.zero_grad(set_to_none=True)
            del out
            seen.append(live_bytes())
    assert len(set(seen)) == 1
    parameters = sum(p.nbytes for p in model.parameters())
    held = sum(x.untyped_storage().nbytes() for x in memory.state_dict().values())
    attention_map = 4 * 2 * 16 * 48 * 4  # B·H·T·N floats
    assert seen[-1] - before - parameters - held < attention_map


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compiles_whole_and_gives_the_same_numbers(compression, compiler):
    """The graph is captured in one piece; the next test hands such a graph to the real compiler."""
    config = tiny_config(compression=compression)
    model = build(config)
    tokens, starts = random_tokens(config, 2, 8), torch.rand(2, 8) < 0.2
    compiled = compiler(model, fullgraph=True, backend="aot_eager")
    want, got = (
        list(run_windows(m, windows_of(tokens, 4), model.initial_memory(2), windows_of(starts, 4)))[-1]
        for m in (model, compiled)
    )
    torch.testing.assert_close(got.logits, want.logits)
    torch.testing.assert_close(got.compression_losses, want.compression_losses)
    for a, b in zip(got.memory.state_dict().values(), want.memory.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("cutoffs", [(), (4,)])
def test_compiled_training_gives_the_same_gradients(cutoffs, compiler):
    config = tiny_config(adaptive_cutoffs=cutoffs)
    tokens, gradients = random_tokens(config, 2, 4), []
    for compiled in (False, True):
        model = build(config, dtype=torch.float32).train()
        run = compiler(model, fullgraph=True) if compiled else model
        with torch.enable_grad():
            out = run(tokens, model.initial_memory(2), targets=tokens)
            (out.nll.mean() + out.compression_loss).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, fast in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("cutoffs", [(), (4,)])
def test_bf16_autocast_trains(compression, cutoffs):
    config = tiny_config(compression=compression, adaptive_cutoffs=cutoffs)
    model = build(config, dtype=torch.float32).train()
    tokens = random_tokens(config, 2, 12)
    memory = model.initial_memory(2)
    for window in windows_of(tokens, 4):
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            out = model(window, memory, targets=window)
        memory = out.memory
        assert out.nll.dtype == torch.float32
        assert {x.dtype for x in (*memory.recent, *memory.compressed)} == {torch.float32}
    exact = list(run_windows(model, windows_of(tokens, 4), model.initial_memory(2)))[-1]
    want = torch.nn.functional.cross_entropy(exact.logits.flatten(0, 1), tokens[:, 8:].flatten())
    torch.testing.assert_close(out.nll.mean(), want, rtol=0.05, atol=0.05)
    with torch.enable_grad():
        (out.nll.mean() + out.compression_loss).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_twenty_four_layers_train(norm):
    torch.manual_seed(0)
    config = tiny_config(n_layers=24, d_model=32, n_heads=2, d_ff=64, window=16, memory_size=16, compressed_size=8,
                         norm=norm)  # fmt: skip
    model = CompressiveLM(config)
    memory = model.initial_memory(4)
    text = random_tokens(config, 4, 5).repeat(1, 4)  # what comes after five tokens is known from the past
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    with torch.enable_grad():
        for step in range(60):
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
            phase = step * 16 % 5
            window, target = text[:, phase:][:, :16], text.roll(-1, 1)[:, phase:][:, :16]
            window, target = (torch.cat([x, x], 1)[:, :16] if x.shape[1] < 16 else x for x in (window, target))
            out = model(window, memory, targets=target)
            loss = out.nll.mean()
            optimiser.zero_grad()
            (loss + out.compression_loss).backward()
            assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimiser.step()
            memory = out.memory
            losses.append(loss.item())
    assert losses[0] > 2.0
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_dropout_acts_on_both_branches(norm):
    layer = build(tiny_config(norm=norm)).trunk.layers[0].train()
    layer.dropout.p = 1.0
    h = torch.randn(2, 4, 8, dtype=torch.float64)
    want = h if norm == "pre" else layer.mlp_norm(layer.attention_norm(h))
    torch.testing.assert_close(layer.mlp_block(layer.add_attention(h, torch.randn_like(h))), want)


def test_dropout_acts_on_input_position_code_output_and_hidden_units():
    trunk = build(tiny_config(dropout=0.3)).trunk.train()
    assert trunk.layers[0].mlp[2].p == 0.3
    trunk.dropout.p = 1.0
    out = trunk(torch.randn(2, 4, 8, dtype=torch.float64), trunk.initial_memory(2))
    assert not out.memory.recent[0].any()
    assert not out.hidden.any()
    assert not trunk.position_code(torch.arange(3), torch.float64).any()


@pytest.mark.parametrize("n_layers", [4, 16])
def test_weights_start_smaller_in_deeper_models(n_layers):
    torch.manual_seed(0)
    model = CompressiveLM(ModelConfig(n_layers=n_layers, d_model=128, d_ff=512, n_heads=2))
    gain = 2 / n_layers**0.5
    layer: Any = model.trunk.layers[0]
    for linear, variance in ((layer.attention.query, gain), (layer.mlp[3], gain), (layer.compression.kernel, 1.0)):
        assert linear.weight.std().item() == pytest.approx((variance / linear.in_features) ** 0.5, rel=0.02)
    assert not layer.mlp[0].bias.any()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_training_step_asks_the_device_nothing(compression):
    """Tensors without data cannot answer: what runs on them never waits for the device."""
    with torch.device("meta"), torch.enable_grad():
        model = CompressiveLM(tiny_config(compression=compression)).train()
        tokens = torch.zeros(2, 4, dtype=torch.long)
        out = model(tokens, model.initial_memory(2), targets=tokens, starts=tokens.bool())
        (out.nll.mean() + out.compression_loss).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("which", ["recent", "compressed"])
def test_whoever_attaches_a_memory_gets_its_gradient(which):
    """Memory that has no graph costs no gradient; one that has must not lose it."""
    config = tiny_config()
    model = build(config).train()
    memory = model.initial_memory(2).map(lambda x: torch.randn_like(x) if x.is_floating_point() else x)
    leaf = getattr(memory.layers[0], which).requires_grad_()
    tokens = random_tokens(config, 2, config.window)
    with torch.enable_grad():
        model(tokens, memory, targets=tokens).nll.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum() > 0


def test_a_norm_after_a_skip_connection_is_rounded_once_to_the_type_of_products():
    torch.manual_seed(0)
    layer = build(tiny_config(), dtype=torch.float32).trunk.layers[0]
    x, y = 100 + torch.randn(2, 50, 8).bfloat16(), torch.randn(2, 50, 8).bfloat16()  # a rounded sum would lose y
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.add_attention(x, y)
        assert layer.mlp_block(found).dtype == torch.bfloat16
    assert torch.equal(found, layer.attention_norm(x.float() + y.float()).bfloat16())
    assert not torch.equal(found, layer.attention_norm((x + y).float()).bfloat16())


def read_by(model, tokens, lengths):
    """The memory after windows of these lengths."""
    outs = list(run_windows(model, tokens.split(lengths, dim=1), model.initial_memory(len(tokens))))
    return outs[-1].memory


def test_short_windows_that_follow_each_other_are_warned_of_once():
    warn_once.cache_clear()
    model = build(tiny_config(compression_rate=(2, 3), window=6))
    with pytest.warns(UserWarning, match=r"shorter than compression_rate=3 .* in 1 of 2 layers; .* step") as caught:
        memory = read_by(model, random_tokens(model.config, 1, 26), [6] * 3 + [2] * 4)
    assert len(caught) == 1
    assert memory.too_short
    whole = read_by(model, random_tokens(model.config, 1, 18), [6] * 3)
    torch.testing.assert_close(memory.compressed[1], whole.compressed[1])  # the warning tells the truth


@pytest.mark.parametrize(
    "values", [{}, {"compressed_size": 0}, {"compressed_size": (3, 0), "compression_rate": (1, 4)}]
)
def test_one_short_window_and_those_that_compress_are_not_warned_of(values, recwarn):
    warn_once.cache_clear()
    model = build(tiny_config(**values))
    tokens, short = random_tokens(model.config, 1, 14), 1 if values else 2
    for lengths in ([4, 4, 4, 1], [1, 4, 1, 4, 1], [1], [short] * 5):  # texts with a rest; windows as short as the rate
        memory = read_by(model, tokens[:, : sum(lengths)], lengths)
        assert memory.too_short == (lengths[-1] == 1 and not values)
    state = model.decoding_state(memory)
    for token in tokens.unbind(dim=1):
        _, state = model.step(token, state)
    assert not recwarn.list


def test_memory_forgets_that_a_window_was_short_when_it_is_saved():
    model = build(tiny_config())
    memory = read_by(model, random_tokens(model.config, 1, 1), [1])
    assert memory.too_short
    assert not any("too_short" in name for name in memory.state_dict())
    assert not type(memory).from_state_dict(memory.state_dict()).too_short
