"""The language model's surface: what it takes, what it gives, what it refuses."""

import pytest
import torch
from helpers import TRAINABLE, build, random_tokens, tiny_config

from compressive import CompressiveLM


def test_output_of_a_window():
    model = build(tiny_config())
    memory = model.initial_memory(batch_size=3)
    tokens = random_tokens(model.config, 3, 4)
    out = model(tokens, memory)
    assert out.logits.shape == (3, 4, 11)
    assert out.compression_loss.shape == ()
    assert out.compression_losses.shape == (2,)
    assert out.nll is None
    assert model(tokens, memory, targets=tokens).nll.shape == (3, 4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int16, torch.int32])
def test_any_integer_type_will_do(dtype):
    model = build(tiny_config())
    tokens, memory = random_tokens(model.config, 2, 4), model.initial_memory(2)
    assert torch.equal(model(tokens.to(dtype), memory).logits, model(tokens, memory).logits)
    assert torch.equal(model(tokens, memory, targets=tokens.to(dtype)).nll, model(tokens, memory, targets=tokens).nll)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(2, 4), r"tokens of type torch.float32: expected integers"),
        (torch.zeros(2, 4, dtype=torch.bool), r"tokens of type torch.bool: expected integers"),
        (torch.zeros(2, 4, dtype=torch.complex64), r"tokens of type torch.complex64: expected integers"),
        (torch.zeros(4, dtype=torch.long), r"tokens of shape \(4,\): expected \(batch, time\)"),
        (torch.full((2, 4), 11), r"tokens from 11 to 11: expected 0 to 10; use the tokeniser"),
        (torch.full((2, 4), -1), r"tokens from -1 to -1: expected 0 to 10"),
        (torch.zeros(2, 5, dtype=torch.long), r"time=5: expected 1 to window=4"),
        (torch.zeros(2, 0, dtype=torch.long), r"time=0: expected 1 to window=4"),
    ],
)
def test_what_are_no_tokens_is_refused(tokens, message):
    model = build(tiny_config())
    with pytest.raises(ValueError, match=message):
        model(tokens, model.initial_memory(2))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.long), r"targets of shape \(2, 3\): expected that of tokens, \(2, 4\)"),
        (torch.full((2, 4), -1), r"targets from -1 to -1: expected 0 to 10"),
        (torch.zeros(2, 4), r"targets of type torch.float32"),
    ],
)
def test_what_are_no_targets_is_refused(targets, message):
    model = build(tiny_config())
    with pytest.raises(ValueError, match=message):
        model(random_tokens(model.config, 2, 4), model.initial_memory(2), targets=targets)


@pytest.mark.parametrize("compression", TRAINABLE)
@pytest.mark.parametrize("loss", ["attention", "autoencoding", "none"])
def test_compressor_parameters_are_those_named_so(compression, loss):
    model = CompressiveLM(tiny_config(compression=compression, compression_loss=loss, compressed_positions="separate"))
    named = [p for name, p in model.named_parameters() if "compress" in name]
    assert [id(p) for p in model.compressor_parameters()] == [id(p) for p in named]
    both = {id(p) for p in model.compressor_parameters()} | {id(p) for p in model.task_parameters()}
    assert both == {id(p) for p in model.parameters()}
    assert len(both) == len(model.compressor_parameters()) + len(model.task_parameters())
    assert named
    assert not CompressiveLM(tiny_config(compressed_size=0)).compressor_parameters()


def test_weights_do_not_depend_on_memory_sizes():
    small, large = tiny_config(), tiny_config(memory_size=50, compressed_size=(70, 1), window=30)
    shapes = [{n: p.shape for n, p in CompressiveLM(c).state_dict().items()} for c in (small, large)]
    assert shapes[0] == shapes[1]


def test_an_untrained_model_knows_nothing():
    torch.manual_seed(0)
    config = tiny_config(vocab_size=256, d_model=64, n_heads=4, d_ff=128)
    model = CompressiveLM(config)
    tokens = random_tokens(config, 16, 4)
    nll = model(tokens, model.initial_memory(16), targets=random_tokens(config, 16, 4, seed=1)).nll
    assert abs(nll.mean().item() - 5.545) < 1.0  # ln 256, and what logits of unit size add
