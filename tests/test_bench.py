"""`compressive bench`: what it measures, on stand-ins whose cost is known, and the command on a real preset."""

import dataclasses
import json
import random
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from training_helpers import command

from compressive import bench
from compressive.cli.bench import main
from compressive.config import ModelConfig, RunConfig, TrainConfig
from compressive.training.flops import zipf_shares

CPU = torch.device("cpu")
SMALL = RunConfig(
    model=ModelConfig(
        n_layers=2, d_model=32, n_heads=2, d_ff=64, window=16, memory_size=16, compressed_size=8, compression_rate=4
    ),
    train=TrainConfig(batch=2),
)


class Clock:
    """A clock that stands still while nobody sleeps; it is in place of `time` where speeds are measured."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bench, "time", clock)
    return clock


def test_parts_of_a_step_are_told_apart(clock, monkeypatch):
    weight = nn.Parameter(torch.ones(3))

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            clock.sleep(0.01)
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            clock.sleep(0.02)
            return gradient.expand(3)

    monkeypatch.setattr(bench, "clip_grad_norm_", lambda *_: clock.sleep(0.004))
    row = bench.measure_training(lambda: Sleep.apply(weight), [[weight]], CPU, steps=5)
    found = {name: row[f"{name}_ms"] for name in ("forward", "backward", "update")}
    assert found == pytest.approx({"forward": 10, "backward": 20, "update": 4})
    assert row["step_ms"] == pytest.approx(34)
    assert row["peak_gib"] > 0


def test_a_step_clips_each_group_apart_and_updates():
    groups = [[nn.Parameter(torch.ones(1))], [nn.Parameter(torch.ones(1))]]
    before = [group[0].detach().clone() for group in groups]
    seen = []

    def forward():
        return groups[0][0].sum() * 0.01 + groups[1][0].sum() * 100

    def watched(group, largest):
        clip_grad_norm_(group, largest)
        seen.append(round(float(group[0].grad), 4))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "clip_grad_norm_", watched)
        bench.measure_training(forward, groups, CPU, steps=1)
    assert seen[:2] == [0.01, 0.1]  # a large gradient in one group leaves the other alone
    assert all((group[0] < old).all() for group, old in zip(groups, before, strict=True))


def test_reading_the_prompt_is_not_counted_in_generation(clock):
    def sample(batch, length, after_token):
        clock.sleep(0.05 * random.random())  # however long that takes
        for _ in range(length):
            clock.sleep(0.002)
            after_token()

    assert bench.measure_generation(sample, 4, 20, CPU) == pytest.approx(4 / 0.002)


def test_tokens_that_settle_are_not_counted_either(clock):
    def sample(batch, length, after_token):
        for i in range(length):
            clock.sleep(0.1 if i < 9 else 0.002)
            after_token()

    assert bench.measure_generation(sample, 4, 20, CPU, settling=8) == pytest.approx(4 / 0.002)


def test_a_sampler_that_samples_another_number_of_tokens_is_not_believed():
    with pytest.raises(RuntimeError, match="0 tokens were sampled: expected 21"):
        bench.measure_generation(lambda batch, length, after_token: None, 4, 20, CPU)


def test_a_measured_step_updates_also_where_updates_are_rarer_than_steps():
    config = dataclasses.replace(SMALL, train=dataclasses.replace(SMALL.train, update_every=4, update_every_from=0))
    subject = bench.ours(config, CPU)
    assert subject.step is not None
    before = [parameter.detach().clone() for group in subject.groups for parameter in group]
    subject.step()
    after = [parameter for group in subject.groups for parameter in group]
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_our_model_carries_its_memory_and_gives_both_losses():
    subject = bench.ours(SMALL, CPU)
    assert subject.forward is not None
    first, second = subject.forward(), subject.forward()
    assert not torch.equal(first, second)  # the same window, after another memory
    second.backward()
    assert len(subject.groups) == 2
    assert all(parameter.grad is not None for group in subject.groups for parameter in group)


def test_words_of_bands_are_as_frequent_as_words_are():
    model = ModelConfig(vocab_size=5000, adaptive_cutoffs=(500, 2000), window=20_000)
    torch.manual_seed(0)
    tokens = bench.random_tokens(RunConfig(model, train=TrainConfig(batch=2)), CPU)
    assert (int(tokens.min()), tokens.dtype) == (0, torch.long)
    assert int(tokens.max()) < 5000
    found = [((tokens >= low) & (tokens < high)).float().mean() for low, high in ((0, 500), (500, 2000), (2000, 5000))]
    assert found == pytest.approx(zipf_shares((0, 500, 2000, 5000)), abs=0.01)


def test_the_prompt_fills_every_memory():
    assert bench.prompt_windows(SMALL) == 4  # 16 + 4 × 8 tokens are three windows; one more is read after them


def test_a_row_has_every_figure():
    row = bench.measure(bench.ours(SMALL, CPU), SMALL, CPU, steps=2)
    assert set(row) == set(bench.COLUMNS) - {"utilisation", "micro_batch"}  # nobody knows a CPU's peak
    assert row["tokens_per_second"] == pytest.approx(2 * 16 / row["step_ms"] * 1e3)
    assert "sampled_per_second_batch_1" not in bench.measure(bench.ours(SMALL, CPU), SMALL, CPU, 1, sampled=0)


def test_a_step_of_micro_batches_is_measured_whole():
    config = dataclasses.replace(SMALL, train=dataclasses.replace(SMALL.train, batch=4, micro_batch=3))
    row = bench.measure(bench.ours(config, CPU), config, CPU, steps=1, sampled=0)
    assert set(row) == {"micro_batch", "step_ms", "peak_gib", "tokens_per_second"}
    assert row["micro_batch"] == 3
    assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["step_ms"] * 1e3)


def test_precision_reaches_forward_alone():
    seen = []
    weight = nn.Parameter(torch.eye(4))

    def forward():
        out = weight @ weight
        seen.append(out.dtype)
        return out.float().sum()

    config = dataclasses.replace(SMALL, train=TrainConfig(batch=2, precision="bf16"))
    bench.measure(bench.Subject(forward, [[weight]]), config, CPU, steps=1)
    assert set(seen) == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("code", "row"),
    [
        ("print('chatter'); print('{\"a\": 1}')", {"a": 1}),
        ("raise ValueError('batch=0: too small')", {"error": "ValueError: batch=0: too small"}),
        ("import os; os._exit(9)", {"error": "ended with code 9"}),
    ],
)
def test_what_goes_wrong_in_a_process_is_a_row(code, row):
    assert bench.in_own_process(["-c", code]) == row


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.Work, "run", lambda self: pytest.fail("rows are measured in processes of their own"))
    file = tmp_path / "bench.json"
    words = ["quickstart", "--batch", "1", "--steps", "1", "--device", "cpu", "--out", str(file)]
    assert main(words, prog="compressive bench") == 0
    shown = capsys.readouterr()
    assert "measuring quickstart, batch 1" in shown.err
    assert "tokens/s" in shown.out
    saved = json.loads(file.read_text())
    assert saved["command"] == " ".join(["compressive bench", *words])
    (row,) = saved["rows"]
    assert (row["name"], row["batch"], row["precision"], row["compile"]) == ("quickstart", 1, "fp32", False)
    assert f"{row['tokens_per_second']:,.0f}" in shown.out
    assert row["sampled_per_second_batch_32"] > 0
    assert f"{row['sampled_per_second_batch_32']:,.0f}" in shown.out


@pytest.mark.parametrize(
    ("asked", "measured"),
    [({}, ("fp32", False)), ({"precision": "bf16"}, ("bf16", False)), ({"compile": True}, ("fp32", True))],
)
def test_what_training_would_do_on_the_device_is_measured(asked, measured, monkeypatch):
    monkeypatch.setattr(bench, "ours", lambda config, device: config)
    monkeypatch.setattr(bench, "measure", lambda subject, config, device, steps: {"subject": subject})
    row = bench.Work("enwik8-base", device="cpu", **asked).run()
    assert (row["precision"], row["compile"]) == measured
    assert (row["subject"].train.precision, row["subject"].train.compile) == measured


def test_bf16_is_refused_on_apple_s_gpu(capsys, monkeypatch):
    monkeypatch.setattr("compressive.runtime.pick_device", lambda name: torch.device("mps"))
    assert main(["--precision", "bf16"], prog="compressive bench") == 2
    assert capsys.readouterr().err == "compressive bench: precision='bf16': expected fp32 on Apple's GPU (mps)\n"


MEASURED = {"tokens_per_second": 12345.6, "step_ms": 1.5}


@pytest.mark.parametrize(
    ("words", "printed", "written"),
    [
        (["quickstart"], "table", False),
        ([], "table", False),
        (["--json"], "JSON", False),
        (["--json", "quickstart"], "JSON", False),
        (["--out", "folder/a.json", "quickstart"], "table", True),
        (["--json", "--out", "folder/a.json"], "JSON", True),
        (["--json", "folder/a.json"], "table", True),  # as version 0.1 had it
        (["quickstart", "--json=folder/a.json", "--batch", "2"], "table", True),
    ],
)
def test_json_is_printed_and_out_is_a_file(words, printed, written, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "in_own_process", lambda command: MEASURED)
    assert main(words, prog="compressive bench") == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("measuring quickstart, batch ")
    if printed == "JSON":
        found = json.loads(shown.out)
        assert found["rows"][0]["tokens_per_second"] == 12345.6
        assert found["command"] == " ".join(["compressive bench", *words])
    else:
        assert "12,346" in shown.out
        assert "{" not in shown.out
    file = tmp_path / "folder" / "a.json"
    assert file.exists() == written
    if written:
        assert json.loads(file.read_text())["rows"][0]["step_ms"] == 1.5


def test_no_key_of_a_row_has_a_space():
    assert all(re.fullmatch(r"[a-z0-9_]+", key) for key in bench.COLUMNS)


def test_explanations_are_one_table_of_operations(capsys):
    assert main(["--explain", "enwik8-base", "--json"], prog="compressive bench") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["operations"]
    assert found["operations"]["relative_attention"] == {"form": "kernel", "why": "kernels/relative_attention.py"}
    assert all(list(choice) == ["form", "why"] for choice in found["operations"].values())


def test_a_failed_row_is_shown_and_tells_in_the_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(bench, "in_own_process", lambda command: {"error": "OutOfMemoryError: [too] much"})
    assert main(["quickstart"], prog="compressive bench") == 1
    assert "quickstart: OutOfMemoryError: [too] much" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nonsense"], "preset='nonsense' does not exist"),
        (["--explain", "nonsense"], "preset='nonsense' does not exist"),
        (["rooms-tiny"], "preset='rooms-tiny' is an agent's; measure it with: python benchmarks/rooms.py"),
        (["--batch", "0"], "batch=0: expected at least 1"),
        (["--batch", "-1"], "batch=-1: expected at least 1"),
        (["--steps", "0"], "steps=0: expected at least 1"),
        (["--device", "abacus"], "device='abacus': expected"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(words, complaint, capsys):
    assert main(words, prog="compressive bench") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"compressive bench: {complaint}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_one_line():
    done = command("bench", "--device", "cuda")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("compressive bench: device='cuda'")
