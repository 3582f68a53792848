"""One step: what it changes, what it leaves alone when something is not finite, and that a captured one is the same."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT, build, tiny_config

from compressive import CompressiveLM
from compressive.config import ModelConfig, RunConfig, TrainConfig
from compressive.data.corpus import Streams
from compressive.distributed import World
from compressive.kernels import dispatch
from compressive.model.embedding import asks_for_shapes
from compressive.training import loop
from compressive.training.muon import layer_matrices
from compressive.training.step import WARM_UP, Step, StepRecord, Windows

CONFIG = tiny_config()
BANDS = tiny_config(adaptive_cutoffs=(4, 8), adaptive_factor=2)


def make(device="cpu", config=CONFIG, **options):
    torch.manual_seed(0)
    model = build(config).float().to(device).train()
    train = TrainConfig(batch=2, learning_rate=1e-3, warmup_steps=1, **options)
    return Step(model, train, World(device=torch.device(device)), 2)


def windows(number, unroll=1, device="cpu", starts=None, resets=None):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(CONFIG.vocab_size, (unroll, 2, CONFIG.window + 1), generator=generator).to(device)
    return Windows(tokens[..., :-1], tokens[..., 1:], starts, resets)


def some_rows(number, unroll=1, device="cpu"):
    """Rows to be reset, others in each step."""
    return torch.tensor([[(number + i) % 3 == row for row in range(2)] for i in range(unroll)], device=device)


def everything(step):
    parts = step.state()
    return {f"{part}.{name}": x.detach().clone() for part, values in parts.items() for name, x in values.items()}


def test_a_step_reports_losses_and_norms_and_changes_parameters_and_memory():
    step, read = make(), windows(0)
    before = everything(step)
    with torch.no_grad():
        want = step.forward(read.tokens[0], step.memory, targets=read.targets[0])
    record = step(read, 1, asked=True)
    assert float(record.loss) == pytest.approx(float(want.nll.mean()))
    assert float(record.compression_loss) == pytest.approx(float(want.compression_loss))
    assert record.gradient_norm > 0
    assert record.compressor_gradient_norm > 0
    assert (record.finite, record.stop) == (1, 1)
    after = everything(step)
    assert not torch.equal(before["model.embedding.table"], after["model.embedding.table"])
    assert not torch.equal(before["memory.layers.0.recent"], after["memory.layers.0.recent"])


@pytest.mark.parametrize("options", [{}, {"optimiser": "muon"}, {"weight_average": 0.5}])
def test_a_step_that_is_not_finite_leaves_all_as_it_was(options):
    step = make(**options)
    step(windows(0), 1)
    before = everything(step)
    forward = step.forward

    def broken(*inputs, **named):
        out = forward(*inputs, **named)
        out.nll.register_hook(lambda gradient: gradient * math.nan)
        return out

    step.forward = broken
    assert step(windows(1), 2).finite == 0
    after = everything(step)
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name


def test_gradients_in_waiting_are_saved_only_where_there_are_some():
    step = make(update_every=3, update_every_from=0)
    seen = []
    for i in range(3):
        step(windows(i), i)
        seen.append((step.accumulating, bool(step.state()["gradient"]), float(step.counted)))
    assert seen == [(True, True, 1), (True, True, 2), (False, False, 0)]
    assert all(float(total.abs().sum()) == 0 for total in step.totals)


def test_memory_is_in_bf16_where_products_are_but_what_is_counted_is_not():
    step = make(config=tiny_config(compression="most_used", compression_loss="none"), precision="bf16")
    step(windows(0), 1)
    layer = step.memory.layers[0]
    assert (layer.recent.dtype, layer.compressed.dtype, layer.usage.dtype) == (*[torch.bfloat16] * 2, torch.float32)


def test_new_documents_are_seen():
    starts = torch.zeros(1, 2, CONFIG.window, dtype=torch.bool)
    starts[0, 1, 2] = True
    plain, told = make(), make()
    for step, given in ((plain, None), (told, starts)):
        step(windows(0), 1, asked=False)
        step(windows(1, starts=given), 2)
    assert told.memory.layers[0].recent_valid[0].all()
    assert not told.memory.layers[0].recent_valid[1].all()
    assert plain.memory.layers[0].recent_valid.all()


@pytest.mark.parametrize("empty", ["zeros", "masked"])
@pytest.mark.parametrize("unroll", [1, 2])
def test_rows_that_are_reset_are_read_as_from_the_beginning(empty, unroll):
    config = tiny_config(empty_memory=empty)
    step = make(config=config, unroll=unroll)
    for i in range(3):
        step(windows(i, unroll), i)
    kept, empty_memory = step.memory, step.forward.initial_memory(2)
    read = windows(3, unroll, resets=torch.tensor([[False, True]] + [[False, False]] * (unroll - 1)))
    with torch.no_grad():
        bits = []
        for memory in (kept, empty_memory):
            for i in range(unroll):
                out = step.forward(read.tokens[i], memory, targets=read.targets[i])
                memory = out.memory
                bits.append(out.nll)
        carried, fresh = torch.stack(bits[:unroll]), torch.stack(bits[unroll:])
    want = (carried[:, 0].mean() + fresh[:, 1].mean()) / 2
    assert float(step(read, 3).loss) == pytest.approx(float(want), rel=1e-6)
    assert abs(float(want) - float(carried.mean())) > 1e-4


def test_muon_moves_matrices_by_its_rate_and_leaves_the_rest_to_adam():
    step, adam = make(optimiser="muon", muon_scale=2.0), make()
    for one in (step, adam):
        for i in range(2):  # memories that are not empty, so that compressors have a gradient
            one.memory = one.losses(windows(3 + i), one.memory).memory.detach()
    before = {name: parameter.detach().clone() for name, parameter in step.named.items()}
    for one in (step, adam):
        one(windows(0), 1)  # the first step at the full rate
    state = step.state()["optimiser"]
    for name, parameter in step.named.items():
        moved = (parameter.detach() - before[name]).square().mean().sqrt()
        if name in layer_matrices(step.forward):
            assert state.keys() >= {f"{name}.momentum"}
            # At most Adam's typical size; less where the gradient has fewer dimensions than the matrix.
            assert 0.5 < float(moved) / (0.2 * 2 * 1e-3) < 1.2, name
        else:
            assert f"{name}.exp_avg" in state
            assert torch.equal(parameter, adam.named[name]), name


@pytest.mark.parametrize("options", [{}, {"update_every": 2, "update_every_from": 0}])
def test_weights_are_averaged_over_updates(options):
    step = make(weight_average=0.5, **options)
    want = {name: parameter.detach().clone() for name, parameter in step.named.items()}
    for i in range(6):
        step(windows(i), i)
        if not options or i % 2:
            decay = min(0.5, (1 + i) / (10 + i))
            want = {name: decay * want[name] + (1 - decay) * p.detach() for name, p in step.named.items()}
    torch.testing.assert_close(step.state()["average"], want)
    trained = {name: parameter.detach().clone() for name, parameter in step.named.items()}
    with step.averaged():
        torch.testing.assert_close(dict(step.named), want)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in step.named.items())
    assert not torch.equal(trained["embedding.table"], want["embedding.table"])


MICRO = 5
"""Rows of the tests of micro-batches."""


def many_rows(number, unroll=1, device="cpu", resets=False):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(CONFIG.vocab_size, (unroll, MICRO, CONFIG.window + 1), generator=generator).to(device)
    rows = torch.rand(unroll, MICRO, generator=generator).to(device) < 0.3
    return Windows(tokens[..., :-1], tokens[..., 1:], None, rows if resets else None)


def make_many(device="cpu", config=CONFIG, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = build(config).to(device, dtype).train()
    train = TrainConfig(batch=MICRO, learning_rate=1e-3, warmup_steps=1, **options)
    return Step(model, train, World(device=torch.device(device)), MICRO)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),
        ({}, {"update_every": 2, "update_every_from": 0}),
        ({"compression_loss": "none"}, {"unroll": 2}),
        ({"compression_loss": "autoencoding", "norm": "pre"}, {"unroll": 2}),
        ({"compression": "most_used", "compression_loss": "none"}, {}),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_micro_batches_give_the_gradients_of_the_whole_batch(rows, model, options):
    config = tiny_config(**model)
    whole, parts = make_many(config=config, **options), make_many(config=config, micro_batch=rows, **options)
    assert [(part.start, part.stop) for part in parts.micro_batches()][-1][1] == MICRO
    assert len(parts.micro_batches()) == -(-MICRO // rows)
    for i in range(5):
        read = many_rows(i, options.get("unroll", 1), resets=True)
        torch.testing.assert_close(*(torch.stack(step(read, i)) for step in (whole, parts)), rtol=1e-9, atol=1e-12)
    # In float64 Adam's steps agree, although it turns rounding errors of gradients into steps of its own.
    torch.testing.assert_close(everything(whole), everything(parts), rtol=1e-7, atol=1e-9)


def test_of_micro_batches_one_that_is_not_finite_spoils_the_step():
    step = make_many(micro_batch=2)
    step(many_rows(0), 1)
    before, forward, calls = everything(step), step.forward, []

    def broken(*inputs, **named):
        out = forward(*inputs, **named)
        calls.append(len(inputs[0]))
        if len(calls) == 2:
            out.nll.register_hook(lambda gradient: gradient * math.nan)
        return out

    step.forward = broken
    assert step(many_rows(1), 2).finite == 0
    assert calls == [2, 2, 1]
    torch.testing.assert_close(everything(step), before, rtol=0, atol=0)


def test_a_micro_batch_that_fits_is_found_before_the_first_step():
    config = tiny_config(dropout=0.1)
    found, given = make_many(config=config, micro_batch="auto"), make_many(config=config, micro_batch=2)
    forward, tried = found.forward, []

    def scarce(tokens, *inputs, **named):
        tried.append(len(tokens))
        if len(tokens) > 2:
            raise torch.OutOfMemoryError
        return forward(tokens, *inputs, **named)

    found.forward = scarce
    torch.manual_seed(1)
    found.fit_micro_batch(many_rows(0))
    assert (found.micro_batch, tried) == (2, [5, 3, 2, 2, 1])
    assert all(parameter.grad is None for parameter in found.named.values())
    rows = [torch.stack(found(many_rows(0), 1))]
    torch.manual_seed(1)
    rows.append(torch.stack(given(many_rows(0), 1)))
    assert torch.equal(*rows)  # random numbers and all else are as if it had been known
    found.forward = lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        found.fit_micro_batch(many_rows(0))


def test_shapes_depend_on_words_only_where_bands_have_no_kernel(monkeypatch):
    assert not asks_for_shapes(build(CONFIG).embedding)
    assert asks_for_shapes(build(BANDS).float().embedding)  # on a CPU words are looked up
    monkeypatch.setattr(dispatch, "_no_gpu", lambda device: None)
    assert asks_for_shapes(build(BANDS).float().embedding) != dispatch.HAS_TRITON
    assert asks_for_shapes(build(BANDS).embedding)  # float64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a GPU")
@pytest.mark.parametrize("options", [{}, {"unroll": 2}, {"update_every": 2, "update_every_from": 0}])
def test_captured_micro_batches_are_the_same(options):
    options |= {"micro_batch": 2}
    captured, plain = (make_many("cuda", dtype=torch.float32, cuda_graph=graph, **options) for graph in (True, False))
    unroll = options.get("unroll", 1)
    for i in range(4 * WARM_UP):
        read = many_rows(i, unroll, "cuda", resets=True)
        torch.testing.assert_close(*(torch.stack(step(read, i)) for step in (captured, plain)))
    assert captured.graphs
    torch.testing.assert_close(everything(captured), everything(plain))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a GPU")
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CONFIG, {}),
        (CONFIG, {"unroll": 2}),
        (CONFIG, {"update_every": 2, "update_every_from": 0}),
        (CONFIG, {"optimiser": "muon"}),
        (CONFIG, {"recompute": True}),
        (CONFIG, {"weight_average": 0.9, "update_every": 2, "update_every_from": 4}),
        (BANDS, {}),
    ],
)
def test_captured_steps_are_the_same(config, options, resets):
    captured, plain = (make("cuda", config=config, cuda_graph=graph, **options) for graph in (True, False))
    unroll = options.get("unroll", 1)
    for i in range(4 * WARM_UP):
        read = windows(i, unroll, "cuda", resets=some_rows(i, unroll, "cuda") if resets else None)
        rows = [torch.stack(step(read, i)) for step in (captured, plain)]
        torch.testing.assert_close(*rows)
    assert captured.graphs
    torch.testing.assert_close(everything(captured), everything(plain))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a GPU")
def test_a_step_is_captured_while_another_thread_waits_for_the_gpu():
    """As the thread does that writes a checkpoint."""
    step, done = make("cuda"), threading.Event()

    def wait():
        while not done.is_set():
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        records = [step(windows(i, device="cuda"), i) for i in range(2 * WARM_UP)]
    finally:
        done.set()
        thread.join()
    assert step.graphs
    assert records[-1].finite == 1


@pytest.mark.soak
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a GPU")
@pytest.mark.filterwarnings("default")
def test_thousands_of_captured_and_compiled_steps_with_resets():
    """A model that twice stopped with a CUDA error, after 270 and after 1,080 steps (docs/log.md)."""
    losses = train_with_resets(torch.device("cuda"), 4_000)
    assert np.mean(losses[-100:]) < 0.7 * np.mean(losses[:100])


def train_with_resets(device, steps, **options):
    """Train a small model on this repository's books; returns its losses."""
    model = ModelConfig(
        vocab_size=256, n_layers=8, d_model=256, n_heads=4, d_ff=960,
        window=384, memory_size=384, compressed_size=576, compression_rate=3,
    )  # fmt: skip
    settings: dict[str, Any] = {"batch": 32, "precision": "bf16", "compile": True, "reset_probability": 0.02}
    settings |= {"optimiser": "muon", "muon_scale": 4.0, "learning_rate": 6e-4, "warmup_steps": 500, "clip": 1.0}
    config = RunConfig(model=model, train=TrainConfig(**settings | {"update_every": 1} | options))
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "books").rglob("*.txt")))
    streams = Streams(np.frombuffer(text, dtype=np.uint8), config.train.batch)
    torch.manual_seed(0)
    step = Step(CompressiveLM(model).to(device).train(), config.train, World(device=device), streams.count)
    readback, found = loop.AsyncReadback(device), []
    for i in range(steps):
        position = i * model.window % (streams.length - model.window)
        found.append(readback.exchange(torch.stack(step(loop._read(streams, position, i, config, device), i))))
    found.append(readback.flush())
    records = [StepRecord(*numbers) for numbers in found if numbers is not None]
    assert all(record.finite == 1 for record in records)
    return [record.loss for record in records]
