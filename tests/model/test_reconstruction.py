"""The losses that train compression: zero when nothing is lost, learned when something is, gradients where due."""

import pytest
import torch
from helpers import TRAINABLE, build, gradient, random_tokens, run_windows, tiny_config, windows_of

from compressive.model.memory import Evicted
from compressive.model.reconstruction import Decoder, attention_loss


def out_of(config, batch=2, windows=4, starts=None):
    model = build(config).train()
    tokens = random_tokens(config, batch, windows * config.window)
    return model, list(run_windows(model, windows_of(tokens, config.window), model.initial_memory(batch), starts))[-1]


@pytest.mark.parametrize("kind", ["mean", "max", "most_used"])
def test_attention_loss_is_zero_when_compression_keeps_everything(kind):
    _, out = out_of(tiny_config(compression=kind, compression_rate=1))
    torch.testing.assert_close(out.compression_losses, torch.zeros(2, dtype=torch.float64), atol=1e-20, rtol=0)
    _, out = out_of(tiny_config(compression=kind, compression_rate=2))
    assert (out.compression_losses > 1e-6).all()


def test_the_loss_is_reported_per_layer_and_is_zero_where_there_is_no_compression():
    _, out = out_of(tiny_config(compressed_size=(3, 0)))
    assert out.compression_loss.shape == ()
    assert out.compression_losses[0] > 0
    assert out.compression_losses[1] == 0
    for config in (tiny_config(compressed_size=0), tiny_config(compression_loss="none")):
        _, out = out_of(config)
        assert out.compression_loss == 0
        assert out.compression_loss.shape == ()


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("loss", ["attention", "autoencoding"])
@pytest.mark.parametrize("kind", TRAINABLE)
def test_compression_loss_reaches_the_compressor_alone(kind, loss, norm):
    model, out = out_of(tiny_config(compression=kind, compression_loss=loss, norm=norm))
    out.compression_loss.backward()
    compressor = {id(p) for p in model.compressor_parameters()}
    assert compressor
    for name, parameter in model.named_parameters():
        assert (id(parameter) in compressor) == ("compress" in name)
        if id(parameter) in compressor:
            assert parameter.grad is not None, name
            assert gradient(parameter).any(), name
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("loss", ["attention", "autoencoding"])
def test_task_loss_never_reaches_the_compressor(kind, loss):
    config = tiny_config(compression=kind, compression_loss=loss)
    model = build(config).train()
    windows = windows_of(random_tokens(config, 2, 5 * config.window), config.window)
    outs = run_windows(model, windows, model.initial_memory(2))
    sum(out.logits.logsumexp(-1).sum() for out in outs).backward()
    compressor = {id(p) for p in model.compressor_parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in compressor:
            assert parameter.grad is None, name
        else:
            assert gradient(parameter).any(), name


@pytest.mark.parametrize("kind", TRAINABLE)
def test_bptt_trains_the_compressor_through_an_unroll_of_two_windows(kind):
    config = tiny_config(compression=kind, compression_loss="none")
    model = build(config).train()
    windows = windows_of(random_tokens(config, 2, 5 * config.window), config.window)
    *_, before = run_windows(model, windows[:3], model.initial_memory(2))
    first = model(windows[3], before.memory.detach())
    second = model(windows[4], first.memory)
    assert first.memory.compressed[0].requires_grad
    assert not first.memory.recent[0].requires_grad

    first.logits.logsumexp(-1).sum().backward(retain_graph=True)
    assert all(p.grad is None for p in model.compressor_parameters())
    second.logits.logsumexp(-1).sum().backward()
    assert all(gradient(p).any() for p in model.compressor_parameters())


@pytest.mark.parametrize("kind", ["max", "mean", "most_used"])
def test_without_a_trainable_compressor_nothing_stays_attached(kind):
    _, out = out_of(tiny_config(compression=kind, compression_loss="none"))
    assert not any(x.requires_grad for x in out.memory.state_dict().values())


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("loss", ["attention", "autoencoding"])
def test_compressors_learn(kind, loss):
    config = tiny_config(compression=kind, compression_loss=loss, memory_size=4, compressed_size=2, n_layers=1)
    model = build(config).train()
    memory = model.initial_memory(8)
    windows = windows_of(random_tokens(config, 8, 8), 4)
    memory = model(windows[0], memory).memory
    optimiser = torch.optim.Adam(model.compressor_parameters(), lr=0.02)
    losses = []
    for _ in range(150):
        loss_now = model(windows[1], memory).compression_loss
        optimiser.zero_grad()
        loss_now.backward()
        optimiser.step()
        losses.append(loss_now.item())
    assert losses[-1] < 0.5 * losses[0]


def test_rows_in_which_a_document_starts_do_not_count():
    starts = [torch.zeros(2, 4, dtype=torch.bool) for _ in range(4)]
    _, plain = out_of(tiny_config(), starts=starts)
    starts[-1][1, 2] = True
    _, broken = out_of(tiny_config(), starts=starts)
    model = build(tiny_config())
    alone = random_tokens(model.config, 2, 16)[:1]
    *_, single = run_windows(model, windows_of(alone, 4), model.initial_memory(1))
    torch.testing.assert_close(broken.compression_loss, single.compression_loss)
    assert plain.compression_loss != broken.compression_loss


def test_nothing_to_see_gives_a_loss_of_zero_and_no_nan():
    query = torch.randn(1, 2, 3, 4)
    slots = torch.randn(1, 2, 2, 2, 4).requires_grad_()
    none, all_rows = torch.zeros(1, 2, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
    loss = attention_loss(query, slots, slots, none, none, all_rows)
    loss.backward()
    assert loss == 0
    assert not gradient(slots).any()


@pytest.mark.parametrize("loss", ["attention", "autoencoding"])
def test_a_row_with_a_start_does_not_count_even_where_its_window_is_evicted_at_once(loss):
    model = build(tiny_config(memory_size=1, compression_rate=1, compression_loss=loss))
    starts = torch.tensor([[True, False, False, False]])
    assert model(random_tokens(model.config, 1, 4), model.initial_memory(1), starts=starts).compression_loss == 0


def test_autoencoding_counts_the_members_of_visible_groups_only():
    decoder = Decoder(tiny_config(), 2)
    valid = torch.tensor([[False, False, True, True]])
    old = Evicted(torch.randn(1, 4, 8) * valid[..., None], valid, None)
    new = torch.randn(1, 2, 8)
    want = (decoder.expand(new[:, 1]).view(2, 8) - old.slots[0, 2:]).square().mean()
    torch.testing.assert_close(decoder(old, new, torch.tensor([[False, True]]), torch.tensor([True])), want)


def test_losses_are_measured_in_full_precision():
    model = build(tiny_config(), dtype=torch.bfloat16)
    *_, out = run_windows(model, windows_of(random_tokens(model.config, 2, 12), 4), model.initial_memory(2))
    assert out.compression_losses.dtype == torch.float32
