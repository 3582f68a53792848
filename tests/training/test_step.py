"""One step: what it changes, what it leaves alone when something is not finite, and that a captured one is the same."""

import math

import pytest
import torch
from helpers import build, tiny_config

from compressive.config import TrainConfig
from compressive.distributed import World
from compressive.training.step import WARM_UP, Step, Windows

CONFIG = tiny_config()


def make(device="cpu", config=CONFIG, **options):
    torch.manual_seed(0)
    model = build(config).float().to(device).train()
    train = TrainConfig(batch=2, learning_rate=1e-3, warmup_steps=1, **options)
    return Step(model, train, World(device=torch.device(device)), 2)


def windows(number, unroll=1, device="cpu", starts=None):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(CONFIG.vocab_size, (unroll, 2, CONFIG.window + 1), generator=generator).to(device)
    return Windows(tokens[..., :-1], tokens[..., 1:], starts)


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


def test_a_step_that_is_not_finite_leaves_all_as_it_was():
    step = make()
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a GPU")
@pytest.mark.parametrize("options", [{}, {"unroll": 2}, {"update_every": 2, "update_every_from": 0}])
def test_captured_steps_are_the_same(options):
    captured, plain = make("cuda", **options), make("cuda", cuda_graph=False, **options)
    for i in range(4 * WARM_UP):
        read = windows(i, options.get("unroll", 1), "cuda")
        rows = [torch.stack(step(read, i)) for step in (captured, plain)]
        torch.testing.assert_close(*rows)
    assert captured.graphs
    torch.testing.assert_close(everything(captured), everything(plain))
