"""Decoding step by step: the windowed pass again, in constant space and time, from states that can be forked."""

import pytest
import torch
from helpers import COMPRESSIONS, build, random_tokens, run_windows, tiny_config, windows_of
from torch.utils.flop_counter import FlopCounterMode

from compressive import CompressiveTransformer, DecodingState


def windowed(model, tokens, memory=None, starts=None):
    memory = model.initial_memory(len(tokens)) if memory is None else memory
    window = model.config.window
    starts = None if starts is None else windows_of(starts, window)
    with torch.no_grad():
        outs = list(run_windows(model, windows_of(tokens, window), memory, starts))
    return torch.cat([out.logits for out in outs], dim=1), outs[-1].memory


def stepped(model, tokens, state, starts=None):
    logits = []
    for t in range(tokens.shape[1]):
        step_logits, state = model.step(tokens[:, t], state, None if starts is None else starts[:, t])
        logits.append(step_logits)
    return torch.stack(logits, dim=1), state


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("positions", ["shared", "separate", "from_window"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_steps_equal_the_windowed_pass(compression, positions, norm, dtype, tolerance):
    config = tiny_config(compression=compression, compressed_positions=positions, norm=norm)
    model = build(config, dtype=dtype)
    tokens = random_tokens(config, 3, 4 * 4 + 2)
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[1, [5, 6, 11]] = True
    starts[2, [0, 16]] = True
    want, memory = windowed(model, tokens, starts=starts)
    got, state = stepped(model, tokens, model.decoding_state(model.initial_memory(3)), starts)
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    # And the memory at the last window's end is the same, as far as it can be seen.
    _, memory = windowed(model, tokens[:, :16], starts=starts[:, :16])
    for got_layer, want_layer in zip(state.memory.layers, memory.layers, strict=True):
        assert torch.equal(got_layer.valid(), want_layer.valid())
        torch.testing.assert_close(got_layer.recent, want_layer.recent, rtol=0, atol=tolerance)
        seen = want_layer.compressed_valid
        torch.testing.assert_close(got_layer.compressed[seen], want_layer.compressed[seen], rtol=0, atol=tolerance)
        torch.testing.assert_close(got_layer.usage, want_layer.usage, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sizes", [(2, 3, 2), (4, 2, 4), (9, 5, 3), ((2, 6), (0, 3), (1, 2)), (6, 0, 2), (0, 0, 1)])
@pytest.mark.parametrize("positions", ["shared", "from_window"])
@pytest.mark.filterwarnings("ignore:window=4 is not a multiple")
def test_steps_equal_the_windowed_pass_at_any_sizes(sizes, positions):
    recent, compressed, rate = sizes
    values = {"memory_size": recent, "compressed_size": compressed, "compression_rate": rate}
    config = tiny_config(**values, empty_memory="masked", compressed_positions=positions)
    model = build(config)
    tokens = random_tokens(config, 2, 5 * 4 + 1)
    got, _ = stepped(model, tokens, model.decoding_state(model.initial_memory(2)))
    torch.testing.assert_close(got, windowed(model, tokens)[0], rtol=0, atol=1e-10)


def test_decoding_goes_on_from_a_memory_that_was_read_in_windows():
    config = tiny_config(compression="most_used")
    model, tokens = build(config), random_tokens(config, 2, 32)
    want, _ = windowed(model, tokens)
    _, memory = windowed(model, tokens[:, :20])
    got, _ = stepped(model, tokens[:, 20:], model.decoding_state(memory))
    torch.testing.assert_close(got, want[:, 20:], rtol=0, atol=1e-10)


def test_a_state_stays_good_after_a_step_from_it():
    config = tiny_config(compression="most_used")
    model, tokens = build(config), random_tokens(config, 1, 24)
    other = random_tokens(config, 1, 12, seed=3)
    for fork in (9, 11, 12):  # in a window, before its last token, at its end
        _, state = stepped(model, tokens[:, :fork], model.decoding_state(model.initial_memory(1)))
        for continuation in (tokens[:, fork:], other, tokens[:, fork:]):
            got, _ = stepped(model, continuation, state)
            want, _ = windowed(model, torch.cat([tokens[:, :fork], continuation], dim=1))
            torch.testing.assert_close(got, want[:, fork:], rtol=0, atol=1e-10)


def test_a_book_is_read_once_and_continued_many_times():
    config = tiny_config()
    model, book = build(config), random_tokens(config, 1, 14)
    _, state = stepped(model, book, model.decoding_state(model.initial_memory(1)))
    continuations = random_tokens(config, 5, 10, seed=2)
    got, _ = stepped(model, continuations, state.select(torch.zeros(5, dtype=torch.long)))
    want, _ = windowed(model, torch.cat([book.expand(5, -1), continuations], dim=1))
    torch.testing.assert_close(got, want[:, 14:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("compression", ["conv", "most_used"])
def test_prompts_of_different_lengths_share_a_batch(compression):
    config = tiny_config(compression=compression)
    model = build(config)
    prompts = [random_tokens(config, 1, length, seed=length) for length in (3, 4, 9, 14)]
    states = [stepped(model, p, model.decoding_state(model.initial_memory(1)))[1] for p in prompts]
    batch = DecodingState.join(states)
    text = random_tokens(config, 4, 13, seed=99)
    got, batch = stepped(model, text, batch)
    for row, prompt in enumerate(prompts):
        want, _ = windowed(model, torch.cat([prompt, text[row : row + 1]], dim=1))
        torch.testing.assert_close(got[row], want[0, prompt.shape[1] :], rtol=0, atol=1e-10)
    rest, _ = stepped(model, text[:2], batch.select(torch.tensor([2, 0])))
    want, _ = windowed(model, torch.cat([prompts[2], text[2:3], text[:1]], dim=1))
    torch.testing.assert_close(rest[0], want[0, -13:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("compression", ["conv", "most_used"])
def test_a_state_is_saved_and_restored_in_mid_window(compression, tmp_path):
    config = tiny_config(compression=compression, compressed_positions="separate")
    model, tokens = build(config), random_tokens(config, 2, 20)
    _, state = stepped(model, tokens[:, :10], model.decoding_state(model.initial_memory(2)))
    state.save(tmp_path / "state.safetensors")
    want, _ = stepped(model, tokens[:, 10:], state)
    got, _ = stepped(model, tokens[:, 10:], DecodingState.load(tmp_path / "state.safetensors"))
    assert torch.equal(got, want)


def test_a_state_moves():
    model = build(tiny_config())
    state = model.decoding_state(model.initial_memory(2)).to("meta")
    assert {x.device.type for name, x in state.state_dict().items() if x.ndim} == {"meta"}


@pytest.mark.parametrize("compression", ["conv", "most_used"])
def test_the_state_does_not_grow(compression):
    model = build(tiny_config(compression=compression))
    state = model.decoding_state(model.initial_memory(2))

    def held():
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors()}.values())

    def tensors():
        return [x for name, x in state.state_dict().items() if name != "room"]

    size, token = held(), torch.zeros(2, dtype=torch.long)
    for _ in range(50):
        _, state = model.step(token, state)
        assert held() <= size + 16 * 2  # positions and starts have storages of their own after a step


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_nothing_in_memory_is_projected_again(norm):
    """Each step does exactly the work of one token; a window's last step adds its compression, and no more."""
    config = tiny_config(memory_size=(6, 4), compressed_size=(3, 5), compression_rate=(2, 4), norm=norm)
    model, B = build(config), 2
    state = model.decoding_state(model.initial_memory(B))
    D, F, T = config.d_model, config.d_ff, config.window
    layers = list(zip(config.memory_sizes, config.compressed_sizes, config.compression_rates, strict=True))
    # query, key, value and output; MLP; content scores, position scores and values over all slots
    one_token = sum(2 * B * (4 * D * D + 2 * D * F + 3 * (M + C + T) * D) for M, C, _ in layers)
    one_token += 2 * B * D * config.vocab_size
    # the convolution, then keys and values of the new slots alone
    window_end = sum(2 * B * (T // rate) * (rate * D * D + 2 * D * D) for _, _, rate in layers)
    for t in range(6 * T):
        with FlopCounterMode(display=False) as counter:
            _, state = model.step(torch.zeros(B, dtype=torch.long), state)
        assert counter.get_total_flops() == one_token + (window_end if t % T == T - 1 else 0)


@pytest.mark.parametrize(
    ("tokens", "starts", "message"),
    [
        (
            torch.zeros(3, dtype=torch.long),
            None,
            r"input of shape \(3, 8\): expected \(2 rows of the state, d_model=8",
        ),
        (torch.zeros(2, 1, dtype=torch.long), None, r"tokens of shape \(2, 1\): expected \(batch,\)"),
        (torch.tensor([0, 11]), None, r"tokens from 0 to 11: expected 0 to 10"),
        (torch.zeros(2, dtype=torch.long), torch.zeros(2), r"starts of type torch.float32"),
        (torch.zeros(2, dtype=torch.long), torch.zeros(1).bool(), r"starts of .* shape \(1,\): expected .* \(2,\)"),
    ],
)
def test_bad_input_is_refused_and_the_state_unharmed(tokens, starts, message):
    model = build(tiny_config())
    state = model.decoding_state(model.initial_memory(2))
    with pytest.raises(ValueError, match=message):
        model.step(tokens, state, starts)
    assert state.owns_buffers


FORKS = {
    "itself": lambda s: s,
    "moved": lambda s: s.to("cpu"),
    "detached": lambda s: s.detach(),
    "restored": lambda s: type(s).from_state_dict(s.state_dict()),
}


@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
def test_interleaved_forks_do_not_disturb_each_other(fork):
    config = tiny_config()
    model, prompt = build(config), random_tokens(config, 1, 6)
    _, state = stepped(model, prompt, model.decoding_state(model.initial_memory(1)))
    texts = [random_tokens(config, 1, 9, seed=s) for s in (1, 2)]
    states = [state, fork(state)]
    logits: list[list[torch.Tensor]] = [[], []]
    for t in range(9):
        for i in (0, 1):
            out, states[i] = model.step(texts[i][:, t], states[i])
            logits[i].append(out)
    for text, got in zip(texts, logits, strict=True):
        want, _ = windowed(model, torch.cat([prompt, text], dim=1))
        torch.testing.assert_close(torch.stack(got, dim=1), want[:, 6:], rtol=0, atol=1e-10)


def test_joined_and_replaced_rows_end_their_windows_in_time():
    config = tiny_config()
    model, tokens = build(config), random_tokens(config, 1, 12)
    fresh = model.decoding_state(model.initial_memory(1))
    _, late = stepped(model, tokens[:, :3], model.decoding_state(model.initial_memory(1)))
    assert DecodingState.join([fresh, late]).remaining == DecodingState.join([late, fresh]).remaining == 1
    assert not DecodingState.join([fresh, late]).together
    assert DecodingState.join([fresh, fresh.clone()]).together
    assert not DecodingState.join([DecodingState.join([fresh, late])] * 2).together  # as many steps left, rows apart
    batch = model.decoding_state(model.initial_memory(2)).put(torch.tensor([0]), late)
    got, _ = stepped(model, tokens[:, 3:].expand(2, -1), batch)
    torch.testing.assert_close(got[0], windowed(model, tokens)[0][0, 3:], rtol=0, atol=1e-10)
    torch.testing.assert_close(got[1], windowed(model, tokens[:, 3:])[0][0], rtol=0, atol=1e-10)
    masked = build(tiny_config(empty_memory="masked"))
    with pytest.raises(ValueError, match="cannot be combined; take them from one model"):
        DecodingState.join([fresh, masked.decoding_state(masked.initial_memory(1))])


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_decoding_under_autocast(norm):
    model = build(tiny_config(norm=norm, memory_size=3, compressed_size=1), dtype=torch.float32)
    tokens = random_tokens(model.config, 2, 14)
    state = model.decoding_state(model.initial_memory(2))
    with torch.autocast("cpu", torch.bfloat16):
        want, _ = windowed(model, tokens)
        got, _ = stepped(model, tokens, state)
        torch.testing.assert_close(got, want, rtol=0, atol=0.15)
        trunk = CompressiveTransformer(model.config)
        state = trunk.decoding_state(trunk.initial_memory(2))
        for _ in range(9):
            hidden, state = trunk.step(torch.randn(2, 8, dtype=torch.bfloat16), state)
    assert hidden.isfinite().all()


def test_decoding_does_not_hold_on_to_a_graph():
    model = build(tiny_config(compression_loss="none")).train()
    *_, out = run_windows(model, windows_of(random_tokens(model.config, 1, 8), 4), model.initial_memory(1))
    assert out.memory.compressed[0].requires_grad
    assert not any(x.requires_grad for x in model.decoding_state(out.memory).memory.compressed)
