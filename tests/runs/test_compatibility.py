"""What version 0.1 wrote still loads, and gives the same numbers: a run, a release, a decoding state and an agent.

`written_by_0.1` was made by that version: 20 steps of a tiny model, its export, the state after a prompt, and an agent.
"""

import json
import shutil

import pytest
import torch
from helpers import TESTS
from training_helpers import command

from compressive import DecodingState
from compressive.inference.generate import generate, prime
from compressive.runs.run import Run
from compressive.runs.trained import Trained

WRITTEN = TESTS / "runs" / "written_by_0.1"
EXPECTED = json.loads((WRITTEN / "expected.json").read_text("utf-8"))
TOKENS = torch.arange(40)


def load(name):
    trained = Trained.load(Run.open(WRITTEN / name))
    return trained.model(trained.config)


@pytest.mark.parametrize("name", ["run", "release"])
def test_a_run_and_a_release_give_the_same_numbers(name):
    model = load(name)
    logits, _ = prime(model, TOKENS[:13])
    torch.testing.assert_close(logits[0, :8], torch.tensor(EXPECTED["logits"]))
    out = model(TOKENS[None, :8], model.initial_memory(1), targets=TOKENS[None, 1:9])
    assert float(out.nll.mean().detach()) == pytest.approx(EXPECTED["nll"], rel=1e-5)
    assert [int(token) for token in generate(model, TOKENS[:13], 20, seed=1)] == EXPECTED["tokens"]


def test_a_saved_state_continues():
    model = load("run")
    saved = DecodingState.load(WRITTEN / "state.safetensors")
    _, state = prime(model, TOKENS[:13])
    for token in TOKENS[13:30]:  # across the ends of two windows
        found, saved = model.step(token[None], saved)
        expected, state = model.step(token[None], state)
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_a_run_is_resumed_and_evaluated(tmp_path):
    shutil.copytree(WRITTEN, tmp_path / "old")
    words = "quickstart --out run --resume --train.steps 24 --data.corpus tiny --data.data-dir data --train.batch 2"
    sizes = "--model.n-layers 2 --model.d-model 16 --model.d-ff 16 --model.n-heads 2 --model.window 8"
    memory = "--model.memory-size 8 --model.compressed-size 4 --train.sample-every 0 --train.attention readable"
    done = command("train", *f"{words} {sizes} {memory}".split(), cwd=tmp_path / "old")
    assert done.returncode == 0, done.stderr
    assert "from step 20" in done.stdout
    done = command("evaluate", "run", "--split", "valid", "--lanes", "2", cwd=tmp_path / "old")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_agent_is_resumed_and_evaluated(tmp_path):
    shutil.copytree(WRITTEN / "agent", tmp_path / "agent")
    config = json.loads((WRITTEN / "agent" / "config.json").read_text("utf-8"))
    words = [f"--task.lanes {config['task']['lanes']}", "--train.steps 512", "--train.batch 4", "--agent.channels 4 8"]
    words += ["--agent.features 12", "--model.d-model 16", "--model.d-ff 16", "--model.n-heads 2", "--task.width 16"]
    words += ["--task.height 12", "--train.device cpu", "--out agent", "--resume"]
    words += [f"--model.{size} 64" for size in ("window", "memory-size", "compressed-size")]  # as the preset had then
    done = command("rl", "train", "rooms-tiny", *" ".join(words).split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "from step 256" in done.stdout
    done = command("rl", "evaluate", "agent", "--episodes", "4", "--lanes", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
