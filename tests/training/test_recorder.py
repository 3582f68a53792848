"""What a run tells: plain lines and a live one, metrics.jsonl without a past that did not last, other sinks."""

import io
import json
import sys
import types
from typing import Any

import pytest
from rich.console import Console

from compressive.config import RunConfig, TrainConfig
from compressive.training.recorder import Recorder, clock

VALUES = {
    "loss": 1.25, "bits": 1.8, "perplexity": 3.5, "compression_loss": 0.1, "learning_rate": 3e-4, "gradient_norm": 0.5,
    "tokens_per_second": 1234.5, "utilisation": None, "peak_gib": 2.0,
}  # fmt: skip


def recorder(folder, first_step=0, unit="bpc", **train):
    return Recorder(folder, RunConfig(train=TrainConfig(steps=100, **train)), first_step, 0.0, unit)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    with recorder(tmp_path) as record:
        record.train(50, VALUES)
        record.evaluation(50, "valid", {"bits": 1.9, "loss": 1.3, "perplexity": 3.7}, best=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(
        "step 50/100  loss 1.2500  bpc 1.800  compression 0.1000  lr 3.00e-04  norm 0.50  1234 tok/s"
    )
    assert "mfu –" in shown[0]
    assert shown[1] == "step 50  validation bpc 1.9000  (best)"
    assert [line["kind"] for line in lines(tmp_path)] == ["train", "eval"]
    assert lines(tmp_path)[0]["loss"] == 1.25


def test_perplexity_where_tokens_are_words(tmp_path, capsys):
    with recorder(tmp_path, unit="ppl") as record:
        record.train(50, VALUES)
    assert "ppl 3.500" in capsys.readouterr().out


def test_a_live_line_on_a_terminal(tmp_path):
    record = recorder(tmp_path)
    screen = io.StringIO()
    record.console = Console(file=screen, force_terminal=True, width=60)
    with record:
        record.train(50, VALUES)
        record.live.refresh()
        record.say("a message")
    shown = screen.getvalue()
    assert all(part in shown for part in ("loss 1.2500", "tok/s", "left", "a message"))  # nothing cut off
    assert record.bar.percentage_completed == 50


def test_lines_of_a_past_that_did_not_last_are_dropped(tmp_path):
    with recorder(tmp_path) as record:
        for step in (10, 20, 30):
            record.train(step, VALUES)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # a crash in mid-line
    with recorder(tmp_path, first_step=20) as record:
        record.train(30, VALUES)
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30]


def test_a_sink_that_is_not_installed_is_named(tmp_path, monkeypatch):
    for name, module in (("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ValueError, match=rf"train.{name}=True: needs pip install 'compressive\[{name}\]'"):
            recorder(tmp_path, **{name: True})


def test_metrics_reach_other_sinks(tmp_path, monkeypatch):
    """Stand-ins with the real names: what matters is what they are told."""
    told: list[Any] = []

    class Writer:
        def __init__(self, folder):
            told.append(("open", folder))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def close(self):
            told.append("closed")

    class WandbRun:
        def log(self, values, step):
            told.append((values, step))

        def finish(self):
            told.append("finished")

    board: Any = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer
    wandb: Any = types.ModuleType("wandb")
    wandb.init = lambda **settings: WandbRun()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with recorder(tmp_path, tensorboard=True, wandb=True) as record:
        record.train(50, VALUES)
    assert ("open", str(tmp_path / "tensorboard")) in told
    assert ("train/loss", 1.25, 50) in told
    assert any(isinstance(entry, tuple) and entry[-1] == 50 and "train/bits" in entry[0] for entry in told)
    assert told[-2:] == ["closed", "finished"]


def test_clock():
    assert clock(3725.9) == "1:02:05"
    assert clock(float("inf")) == "?"
