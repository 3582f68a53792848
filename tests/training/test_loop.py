"""The training loop: against a plain one, through kills and faults, bit for bit."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers import TESTS
from torch.distributed.checkpoint import state_dict_saver
from training_helpers import SHARD, command, flags, latest, make_run, model_config, tiny_corpus, tiny_run_config
from warm_python import interpreter

from compressive import CompressiveLM
from compressive.data.corpus import Corpus, Streams
from compressive.evaluation.score import score
from compressive.runs.trained import Trained
from compressive.training import loop
from compressive.training.schedule import learning_rate

KILLED = str(TESTS / "killed_worker.py")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    tiny_corpus(folder)
    return folder


def final_tensors(folder):
    found = latest(folder / "checkpoints")
    parts = ("model", "optimiser", "memory", "counted", "rng")
    return {f"{part}.{name}": tensor for part in parts for name, tensor in found.tensors(part).items()}


def assert_identical(a, b):
    a, b = final_tensors(a), final_tensors(b)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def metrics(folder, kind="train"):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def double():
    """Float64 everywhere: Adam turns a gradient's rounding error into a step of its own."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def muon_matrices(model):
    """What Muon updates, written out: query, keys, values, output, positions, both of the MLP, the convolution."""
    layers = model.trunk.layers
    single = [w for x in layers for w in (x.attention.query, x.attention.output, x.attention.relative)]
    single += [w for x in layers for w in (x.mlp[0], x.mlp[3], x.compression.kernel)]
    return [(w.weight, 1) for w in single] + [(x.attention.key_value.weight, 2) for x in layers]


def muon_update(x):
    """One matrix by the iteration that torch's Muon has, in the type of the matrix."""
    tall = x.shape[0] > x.shape[1]
    y = (x.T if tall else x) / x.norm().clamp(min=1e-7)  # a compressor's first gradients are 0
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return 0.2 * max(x.shape) ** 0.5 * (y.T if tall else y)


def plain_training(config, data_dir):
    """The same training written out with nothing but torch: no guards, no accumulation buffers, no resuming."""
    options = config.train
    torch.manual_seed(options.seed)
    model = CompressiveLM(model_config(config)).train()
    streams = Streams(Corpus.open(data_dir / "tiny").split("train"), options.batch)
    compressors = model.compressor_parameters()
    others = [p for name, p in model.named_parameters() if "compress" not in name]
    muons = muon_matrices(model) if options.optimiser == "muon" else []
    optimiser = torch.optim.Adam([p for p in others + compressors if all(p is not q for q, _ in muons)], lr=1.0)
    momenta = [torch.zeros_like(p) for p, _ in muons]
    memory, waiting, k = model.initial_memory(options.batch), 0, 1
    for step in range(options.steps):
        loss = torch.zeros(())
        for i in range(options.unroll):
            x, y = streams.window((step * options.unroll + i) * config.model.window, config.model.window)
            out = model(torch.tensor(np.array(x)).long(), memory, targets=torch.tensor(np.array(y)).long())
            memory = out.memory
            loss = loss + (out.nll.mean() + out.compression_loss) / options.unroll
        memory = memory.detach()
        k = options.update_every if step >= options.update_every_from else 1
        (loss / k).backward()
        waiting += 1
        if waiting == k:
            torch.nn.utils.clip_grad_norm_(others, options.clip)
            if compressors:
                torch.nn.utils.clip_grad_norm_(compressors, options.clip)
            optimiser.param_groups[0]["lr"] = learning_rate(step, options)
            optimiser.step()
            with torch.no_grad():
                for (p, parts), momentum in zip(muons, momenta, strict=True):
                    momentum.lerp_(p.grad, 0.05)
                    for rows, ahead in zip(p.chunk(parts), p.grad.lerp(momentum, 0.95).chunk(parts), strict=True):
                        rows -= options.muon_scale * learning_rate(step, options) * muon_update(ahead)
                    p.grad = None
            optimiser.zero_grad()
            waiting = 0
    return model, memory


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({}, {}),
        ({}, {"optimiser": "muon", "muon_scale": 3.0}),
        ({"compressed_size": 0}, {}),
        ({"compression": "most_used"}, {"update_every": 3, "update_every_from": 5}),
        ({"compression_loss": "none"}, {"unroll": 2}),
        ({"compression_loss": "autoencoding"}, {"unroll": 2, "update_every": 2, "update_every_from": 0}),
    ],
)
def test_the_loop_trains_as_a_plain_one_does(model, train, data_dir, tmp_path, double):
    config = tiny_run_config(data_dir, model, **train)
    assert loop.train(make_run(tmp_path / "run", config)) == loop.FINISHED
    want, memory = plain_training(config, data_dir)
    found = latest(tmp_path / "run" / "checkpoints")
    for name, tensor in found.tensors("model").items():
        torch.testing.assert_close(tensor, want.state_dict()[name], rtol=0, atol=1e-9, msg=name)
    remembered = found.tensors("memory")
    for name, tensor in memory.state_dict().items():
        torch.testing.assert_close(remembered[name], tensor, rtol=0, atol=1e-9, msg=name)


def test_bptt_trains_the_compressor_and_unroll_one_is_refused(data_dir, tmp_path):
    config = tiny_run_config(data_dir, {"compression_loss": "none"}, unroll=2, steps=12)
    loop.train(make_run(tmp_path / "run", config))
    torch.manual_seed(0)
    start = CompressiveLM(model_config(config)).state_dict()
    trained = final_tensors(tmp_path / "run")
    name = "trunk.layers.0.compression.kernel.weight"
    assert not torch.equal(start[name], trained[f"model.{name}"])
    with pytest.raises(
        ValueError, match=r"compression='conv' with compression_loss='none' and unroll=1: nothing would"
    ):
        tiny_run_config(data_dir, {"compression_loss": "none"})


def test_metrics_and_loss(data_dir, tmp_path, capsys):
    config = tiny_run_config(data_dir, steps=60, sample_every=60, sample_tokens=20)
    loop.train(make_run(tmp_path / "run", config))
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(5, 61, 5))
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[-1]["bits"] == pytest.approx(lines[-1]["loss"] / np.log(2))
    assert lines[-1]["tokens"] == 60 * 4 * 16
    assert {"compression_loss", "learning_rate", "gradient_norm", "tokens_per_second", "peak_gib"} <= lines[0].keys()
    assert [line["step"] for line in metrics(tmp_path / "run", "eval")] == [10, 20, 30, 40, 50, 60]
    shown = capsys.readouterr().out
    assert "step 60/60" in shown
    assert "tok/s" in shown
    assert "validation bpc" in shown
    (sample,) = (tmp_path / "run" / "samples").iterdir()
    assert "[sample]" in sample.read_text()


def test_micro_batches_are_said_and_train_the_same(data_dir, tmp_path, capsys):
    for name, rows in (("whole", 0), ("parts", 3), ("auto", "auto")):
        loop.train(make_run(tmp_path / name, tiny_run_config(data_dir, micro_batch=rows)))
    said = capsys.readouterr().out
    assert said.count("micro-batches of 3 rows") == said.count("micro-batches") == 1  # the CPU has enough for all rows
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("whole", "parts", "auto")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[2] == losses[0]


def test_the_average_of_the_weights_is_evaluated_kept_and_exported(data_dir, tmp_path):
    values = {"weight_average": 0.9, "eval_every": 10, "sample_every": 10, "sample_tokens": 5}
    for name, stops in (("whole", [20]), ("parts", [10, 20])):
        for steps in stops:
            run = make_run(tmp_path / name, tiny_run_config(data_dir, STEADY, **values, steps=steps))
            loop.train(run)
    assert_identical(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (latest(tmp_path / name / "checkpoints").tensors("average") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    trained = Trained.load(run, "last")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in trained.weights.items())
    nats = score(trained.model(run.config.model), Corpus.open(data_dir / "tiny").split("valid")[:500], streams=4)
    assert metrics(tmp_path / "parts", "eval")[-1]["loss"] == pytest.approx(float(nats.mean()), rel=1e-5)
    plain = make_run(tmp_path / "plain", tiny_run_config(data_dir, STEADY, **values | {"weight_average": 0.0}))
    loop.train(plain)
    losses = [[line["loss"] for line in metrics(folder)] for folder in (plain.folder, tmp_path / "whole")]
    assert losses[0] == losses[1]  # averages do not change how it trains


STEADY = {"dropout": 0.1}


def steady(data_dir, **train):
    """Dropout, rare updates and samples: all that could make a resumed run differ."""
    values = {"steps": 20, "update_every": 3, "update_every_from": 4, "sample_every": 7, "sample_tokens": 5} | train
    return tiny_run_config(data_dir, STEADY, **values)


@pytest.fixture(scope="module")
def uninterrupted(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    loop.train(make_run(folder, steady(data_dir)))
    return folder


def start_training(folder, config, before=("-m", "compressive")):
    words = [*interpreter(), *before, "train", "enwik8", *flags(config), "--out", str(folder)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.mark.slow
def test_ten_steps_a_kill_and_ten_more_are_twenty_steps(data_dir, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    process = start_training(folder, steady(data_dir), before=[KILLED, "10", "0"])
    _, error = process.communicate()
    assert process.returncode == -signal.SIGKILL, error
    assert latest(folder / "checkpoints").step == 10
    result = command("train", "enwik8", *flags(steady(data_dir)), "--out", folder, "--resume")
    assert result.returncode == 0, result.stderr
    assert "from step 10" in result.stdout
    assert_identical(folder, uninterrupted)
    got, want = ([(m["step"], m["loss"]) for m in metrics(f)] for f in (folder, uninterrupted))
    assert got == want


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_with_its_own_code(number, data_dir, tmp_path):
    config = steady(data_dir, steps=100_000, checkpoint_every=100_000, eval_every=0)
    process = start_training(tmp_path / "run", config)
    path = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    out, error = process.communicate(timeout=240)
    assert process.returncode == loop.INTERRUPTED, error
    assert f"after {number.name}; continue with: compressive train --resume " in out
    found = latest(tmp_path / "run" / "checkpoints")
    assert found.step >= 5
    # And what was saved in mid-accumulation goes on as if nothing had happened.
    steps = found.step + 4
    resumed = make_run(tmp_path / "run", steady(data_dir, steps=steps, checkpoint_every=100_000, eval_every=0))
    loop.train(resumed)
    loop.train(make_run(tmp_path / "whole", resumed.config))
    assert_identical(tmp_path / "run", tmp_path / "whole")


def test_rows_are_reset_by_seed_and_step_alone(data_dir, tmp_path):
    """About as often as asked for, the same for any number of processes, and the same after a resume."""
    options = tiny_run_config(data_dir, batch=12, unroll=2, reset_probability=0.2).train
    tokens = Corpus.open(data_dir / "tiny").split("train")
    rows = np.stack([loop._resets(Streams(tokens, 12), step, options) for step in range(500)])
    assert rows.shape == (500, 2, 12)
    assert abs(rows.mean() - 0.2) < 0.02
    assert np.all(rows.any(axis=(0, 1)))
    parts = [loop._resets(Streams(tokens, 12, first, 4), 7, options) for first in (0, 4, 8)]
    assert np.array_equal(np.concatenate(parts, axis=1), rows[7])
    config = tiny_run_config(data_dir, reset_probability=0.3)
    for name, stops in (("whole", [20]), ("resumed", [10, 20])):
        for steps in stops:
            loop.train(make_run(tmp_path / name, tiny_run_config(data_dir, reset_probability=0.3, steps=steps)))
    assert_identical(tmp_path / "whole", tmp_path / "resumed")
    loop.train(make_run(tmp_path / "never", dataclasses.replace(config, train=tiny_run_config(data_dir).train)))
    assert metrics(tmp_path / "never")[-1]["loss"] != metrics(tmp_path / "whole")[-1]["loss"]


def test_a_damaged_checkpoint_is_detected_and_the_one_before_used(data_dir, uninterrupted, tmp_path, capsys):
    folder = tmp_path / "run"
    loop.train(make_run(folder, steady(data_dir)))
    path = folder / "checkpoints" / "step-00000020" / SHARD
    path.write_bytes(path.read_bytes()[:-100])
    loop.train(make_run(folder, steady(data_dir)))
    assert "does not match its checksum; going back" in capsys.readouterr().err
    assert_identical(folder, uninterrupted)


class Faulty(CompressiveLM):
    """Gives a loss of NaN at chosen calls in training."""

    bad: tuple[int, ...] = ()
    calls = 0

    def forward(self, tokens, memory, targets=None, starts=None):
        import dataclasses

        out = super().forward(tokens, memory, targets, starts)
        if self.training:
            type(self).calls += 1
            if type(self).calls in self.bad:
                assert out.nll is not None
                spoilt = out.memory.map(lambda x: x * float("nan") if x.is_floating_point() else x)
                return dataclasses.replace(out, nll=out.nll * float("nan"), memory=spoilt)
        return out


@pytest.mark.parametrize("update_every", [1, 4])
def test_a_non_finite_step_is_skipped_with_its_memory(update_every, data_dir, tmp_path, monkeypatch, capsys):
    accumulation = {"update_every": update_every, "update_every_from": 0}
    config = tiny_run_config(data_dir, steps=8, checkpoint_every=4, eval_every=0, **accumulation)
    monkeypatch.setattr(loop, "build_model", Faulty)
    monkeypatch.setattr(Faulty, "calls", 0)
    monkeypatch.setattr(Faulty, "bad", (8,))
    loop.train(make_run(tmp_path / "run", config))
    assert "update and memory skipped" in capsys.readouterr().err
    after = final_tensors(tmp_path / "run")
    assert all(tensor.isfinite().all() for tensor in after.values())
    if update_every == 1:  # the eighth step left no trace
        shorter = tiny_run_config(data_dir, steps=7, checkpoint_every=4, eval_every=0)
        monkeypatch.setattr(Faulty, "bad", ())
        loop.train(make_run(tmp_path / "seven", shorter))
        before = final_tensors(tmp_path / "seven")
        for name in before:
            assert torch.equal(after[name], before[name]), name


def test_three_non_finite_steps_in_a_row_stop_the_run(data_dir, tmp_path, monkeypatch):
    config = tiny_run_config(data_dir, steps=30, checkpoint_every=5, eval_every=0)
    monkeypatch.setattr(loop, "build_model", Faulty)
    monkeypatch.setattr(Faulty, "calls", 0)
    monkeypatch.setattr(Faulty, "bad", (3, 7, 8, 12, 13, 14))
    with pytest.raises(loop.DivergedError, match=r"3 steps in a row.*the last checkpoint is good: lower"):
        loop.train(make_run(tmp_path / "run", config))
    assert latest(tmp_path / "run" / "checkpoints").step == 10


def test_a_full_disk_does_not_end_training(data_dir, tmp_path, monkeypatch, capsys):
    config = tiny_run_config(data_dir, eval_every=0)
    real = state_dict_saver.save

    def full(tensors, storage_writer, **options):
        if "step-00000010" in str(storage_writer.path):
            raise OSError(28, "No space left on device")
        real(tensors, storage_writer=storage_writer, **options)

    monkeypatch.setattr(state_dict_saver, "save", full)
    assert loop.train(make_run(tmp_path / "run", config)) == loop.FINISHED
    assert "No space left on device" in capsys.readouterr().out
    assert latest(tmp_path / "run" / "checkpoints").step == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["enwik9"], "preset='enwik9': expected a preset as the first argument"),
        ([], "preset=None: expected a preset as the first argument"),
        (["enwik8", "--model.n-heads", "3"], "n_heads=3: expected a divisor"),
        (["enwik8", "--data.data-dir", "nowhere"], "compressive data prepare enwik8"),
        (["enwik8", "--model.compression-loss", "none"], "nothing would train the compressor"),
    ],
)
def test_bad_commands_say_what_is_wrong(words, message, tmp_path):
    result = command("train", *words, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_run_is_not_overwritten_nor_resumed_as_another(data_dir, uninterrupted):
    again = command("train", "enwik8", *flags(steady(data_dir)), "--out", uninterrupted)
    assert again.returncode == 2
    assert "holds a run already: continue it with --resume" in again.stderr
    other = command("train", "enwik8", *flags(steady(data_dir, batch=2)), "--out", uninterrupted, "--resume")
    assert other.returncode == 2
    assert "train.batch=2: the run to be resumed has 4" in other.stderr


def test_sizes_that_do_not_fit_are_refused(data_dir, tmp_path):
    with pytest.raises(
        ValueError, match=r"vocab_size=100: the corpus tiny has 256 tokens; give --model.vocab-size 256"
    ):
        loop.train(make_run(tmp_path / "a", tiny_run_config(data_dir, {"vocab_size": 100})))
    with pytest.raises(ValueError, match=r"batch=2000: a stream of tiny has \d+ tokens, a step needs 16"):
        loop.train(make_run(tmp_path / "b", tiny_run_config(data_dir, batch=2000)))
    with pytest.raises(ValueError, match="device='warp'"):
        loop.train(make_run(tmp_path / "c", tiny_run_config(data_dir, device="warp")))


@pytest.mark.slow
def test_bf16_and_compile_train(data_dir, tmp_path):
    config = tiny_run_config(data_dir, {"n_layers": 1}, steps=12, precision="bf16", compile=True, eval_every=0)
    loop.train(make_run(tmp_path / "run", config))
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot tell its own memory from its parent's")
def test_the_memory_of_a_process_is_its_own_and_not_its_parents():
    held = b"x" * 2**30
    asked = "import torch; from compressive.runtime import peak_gib; print(peak_gib(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert 0.01 < float(done.stdout) < len(held) / 2**30 * 0.9
