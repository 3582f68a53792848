"""The experiment on training recipes: its flags are those of the command, and finished runs are not trained again."""

import argparse
import json
import runpy

import pytest
from helpers import ROOT
from training_helpers import tiny_corpus

from compressive.cli import main
from compressive.config import RunConfig

SCRIPT = runpy.run_path(str(ROOT / "experiments" / "recipes.py"))
CHANGES = SCRIPT["variants"](6e-4, 16)
OPTIONS = argparse.Namespace(steps=7000, rate=6e-4, eval_tokens=10, flags="--model.dropout 0.05 --train.update-every 1")


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_understood_and_overrides_the_others(name, tmp_path, monkeypatch):
    tiny_corpus(tmp_path)
    configs: list[RunConfig] = []

    def called(run, _):
        configs.append(run.config)
        return 0

    monkeypatch.setattr("compressive.training.loop.train", called)
    words = map(str, SCRIPT["command"](OPTIONS, CHANGES[name], 3))
    data = ["--data.corpus", "tiny", "--data.data-dir", str(tmp_path), "--out", str(tmp_path / "run"), "--resume"]
    assert main(["train", "enwik8-base", *words, *data]) == 0
    (config,) = configs
    train = config.train
    assert (train.steps, train.warmup_steps, train.decay_steps, train.seed, train.update_every) == (7000, 700, 0, 3, 1)
    assert config.model.dropout == CHANGES[name].get("--model.dropout", 0.05)
    assert train.learning_rate == CHANGES[name].get("--train.learning-rate", 6e-4)


def test_a_run_is_finished_once_its_last_step_is_evaluated(tmp_path):
    assert not SCRIPT["finished"](tmp_path, 4)
    train = {"kind": "train", "step": 4, "bits": 2.5, "tokens_per_second": 9.6, "seconds": 3.0}
    lines = [train, {"kind": "eval", "step": 4, "bits": 2.25}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert SCRIPT["finished"](tmp_path, 4)
    assert not SCRIPT["finished"](tmp_path, 5)
    assert SCRIPT["figures"](tmp_path) == {
        "validation_bits": 2.25, "training_bits": 2.5, "tokens_per_second": 10, "seconds": 3.0,
    }  # fmt: skip
