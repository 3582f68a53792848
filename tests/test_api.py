"""The package from Python: load, generate, score, read, train; and calls that are wrong."""

import dataclasses
import json
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_helpers import command, make_run, tiny_corpus, tiny_run_config

import compressive
from compressive import CompressiveLM, TextState
from compressive.data.corpus import Corpus
from compressive.inference.generate import generate
from compressive.runs.run import Run
from compressive.training import loop

TEXT = "the cat sat on a mat and then the dog ran"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    tiny_corpus(folder / "data")
    loop.train(make_run(folder / "run", tiny_run_config(folder / "data", steps=30, eval_every=30)))
    return folder


@pytest.fixture(scope="module")
def model(home):
    return compressive.load(home / "run", device="cpu")


def test_a_run_and_its_export_are_the_same_model(home, model, tmp_path):
    assert isinstance(model.model, CompressiveLM)
    assert model.config.train.steps == 30
    assert (model.tokenizer.kind, model.step) == ("bytes", 30)
    assert "step 30" in repr(model)
    assert command("export", home / "run", "--out", tmp_path / "release").returncode == 0
    shutil.copytree(tmp_path / "release", tmp_path / "elsewhere" / "release")  # far from any corpus
    released = compressive.load(str(tmp_path / "elsewhere" / "release"), device="cpu")
    assert released.generate(TEXT, 20, seed=3) == model.generate(TEXT, 20, seed=3)


def test_text_is_what_the_command_and_the_function_give(home, model):
    prompt = torch.tensor(list(TEXT.encode()))
    tokens = torch.stack(list(generate(model.model, prompt, 30, seed=5)), dim=1)[0]
    assert torch.equal(model.generate(prompt, 30, seed=5), tokens)
    assert torch.equal(model.generate(list(TEXT.encode()), 30, seed=5), tokens)
    assert torch.equal(model.generate(np.frombuffer(TEXT.encode(), np.uint8), 30, seed=5), tokens)
    text = bytes(tokens.tolist()).decode("utf-8", "replace")
    assert model.generate(TEXT, 30, seed=5) == model.generate(TEXT.encode(), 30, seed=5) == text
    assert "".join(model.stream(TEXT, 30, seed=5)) == text
    printed = command("generate", home / "run", "--prompt", TEXT, "--length", "30", "--seed", "5", "--device", "cpu")
    assert printed.stdout.rstrip("\n") == text.rstrip("\n")


def test_several_samples_and_several_prompts_in_one_batch(model):
    samples = model.generate(TEXT, 25, samples=3)
    assert len(set(samples)) == 3
    assert model.generate(list(TEXT.encode()), 25, samples=3).shape == (3, 25)
    prompts = [TEXT, "by the sea", TEXT * 3, "a"]  # windows end at different steps
    together = model.generate(prompts, 40, temperature=0)
    assert together == [model.generate(prompt, 40, temperature=0) for prompt in prompts]
    with pytest.raises(ValueError, match="samples=2 of 4 prompts: expected one prompt"):
        model.generate(prompts, 5, samples=2)


@pytest.mark.parametrize("cut", [1, 10, 16, 17, 40])
def test_a_text_read_in_parts_is_the_text_read_at_once(model, cut):
    text = (TEXT * 3)[:100]
    whole, parts = model.read(text), model.read(text[cut:], model.read(text[:cut]))
    torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-5, atol=1e-5)
    assert model.generate(parts, 30, temperature=0) == model.generate(text, 30, temperature=0)


def test_a_state_can_be_forked_saved_moved_and_continued(model, tmp_path):
    state = model.read(TEXT)
    before = state.state_dict()["logits"].clone()
    first = model.generate(state, 30, seed=1)
    assert model.generate(state, 30, seed=1) == first  # going on from it changed nothing
    assert torch.equal(state.logits, before)
    state.save(tmp_path / "book.state")
    kept = TextState.load(tmp_path / "book.state").to("cpu")
    assert model.generate(kept, 30, seed=1) == first
    assert model.generate([kept, "by the sea"], 9, temperature=0)[0] == model.generate(TEXT, 9, temperature=0)
    small, large = (sum(x.nbytes for x in model.read(TEXT * n).state_dict().values()) for n in (1, 20))
    assert small == large


def test_scores_are_those_of_evaluate(home, model):
    corpus = Corpus.open(home / "data" / "tiny")
    tokens = np.array(corpus.split("test"))
    found = model.score(tokens.tobytes())
    done = command("evaluate", home / "run", "--split", "test", "--json", "--device", "cpu")
    expected = json.loads(done.stdout)
    assert found.bits == pytest.approx(expected["bits_per_character"], rel=1e-6)
    assert found.bits_per_byte == pytest.approx(found.bits)
    assert found.perplexity == pytest.approx(2**found.bits)
    assert found.nats.shape == tokens.shape
    assert np.array_equal(model.score(torch.from_numpy(tokens.astype(np.int64))).nats, found.nats)


def test_memory_sizes_may_differ(home):
    larger = compressive.load(home / "run", compressed_size=64, device="cpu")
    assert larger.model.config.compressed_size == 64
    assert larger.model.config.empty_memory == "masked"
    assert len(larger.generate(TEXT, 5, temperature=0)) == 5


def window(model):
    """Two tokens and an empty memory."""
    return torch.zeros(1, 2, dtype=torch.long), model.model.initial_memory(1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.generate(3.5), TypeError | ValueError, "expected"),
        (lambda m: m.generate({"a": 1}), TypeError, "dict: expected str, bytes, a state, or tokens"),
        (lambda m: m.generate([0.5, 1.5]), ValueError, "expected integers"),
        (lambda m: m.generate([]), ValueError, "expected integers"),
        (lambda m: m.generate([999]), ValueError, "tokens from 999 to 999: expected 0 to 255"),
        (lambda m: m.generate("a", 0), ValueError, "length=0: expected at least 1"),
        (lambda m: m.generate("a", 5, temperature=-1), ValueError, "temperature=-1: expected"),
        (lambda m: m.read("a", state="b"), TypeError, "state of type str: expected a TextState"),
        (lambda m: m.stream(["a", "b"]), ValueError, "2 prompts: expected one"),
        (lambda m: m.model([[1, 2]], m.model.initial_memory(1)), TypeError, "tokens of type list: expected a tensor"),
        (lambda m: m.model(np.zeros((1, 2), int), m.model.initial_memory(1)), TypeError, "tokens of type ndarray"),
        (lambda m: m.model(torch.zeros(1, 2).long(), None), TypeError, "memory of type NoneType: expected a Memory"),
        (lambda m: m.model(torch.zeros(1, 2).long(), {}), TypeError, "memory of type dict: expected a Memory"),
        (lambda m: m.model(*window(m), targets=[1]), TypeError, "targets of type list: expected a tensor"),
        (lambda m: m.model.step(torch.zeros(1).long(), None), TypeError, "state of type NoneType: expected a Decoding"),
    ],
)  # fmt: skip
def test_wrong_calls_say_what_was_expected(model, call, error, message):
    with pytest.raises(
        error if isinstance(error, type) else (TypeError, ValueError), match=message.replace("(", r"\(")
    ):
        call(model)


def test_a_state_of_another_model_is_refused(model):
    other = CompressiveLM(dataclasses.replace(model.model.config, n_layers=1)).eval()
    state = other.decoding_state(other.initial_memory(1))
    with pytest.raises(
        ValueError,
        match=r"state of another model: 2 heads of width 16, slots by layer \[40\]; expected 2 of width 16, \[40, 40\]",
    ):
        model.model.step(torch.tensor([1]), state)
    narrow = CompressiveLM(dataclasses.replace(model.model.config, memory_size=(3, 16))).eval()  # in one layer only
    with pytest.raises(ValueError, match="state of another model"):
        model.model.step(torch.tensor([1]), narrow.decoding_state(narrow.initial_memory(1)))


def test_a_text_s_state_belongs_to_weights_and_memory_sizes(home, model, tmp_path):
    state = model.read(TEXT)
    for values in ({"memory_size": (16, 8)}, {"empty_memory": "masked"}):
        other = compressive.load(home / "run", device="cpu", **values)
        with pytest.raises(ValueError, match="state of another model: expected one read with these weights"):
            other.generate(state, 5)
        with pytest.raises(ValueError, match="state of another model"):
            other.read("more", state)
    config = dataclasses.replace(model.model.config)
    fresh = [compressive.TextModel(CompressiveLM(config).eval(), model.tokenizer, model.config, 0) for _ in range(2)]
    with pytest.raises(ValueError, match="state of another model"):
        fresh[0].generate(fresh[1].read(TEXT), 5)


@pytest.mark.parametrize("values", [{}, {"adaptive_cutoffs": (40, 120)}])
def test_targets_of_minus_100_are_ignored(model, values):
    lm = CompressiveLM(dataclasses.replace(model.model.config, **values))
    tokens = torch.randint(256, (2, 16))
    targets = torch.randint(256, (2, 16))
    ignored = torch.rand(2, 16) < 0.4
    weights = [parameter for name, parameter in lm.named_parameters() if name.startswith("embedding")]
    whole = lm(tokens, lm.initial_memory(2), targets=targets)
    out = lm(tokens, lm.initial_memory(2), targets=targets.masked_fill(ignored, -100))
    assert (out.nll[ignored] == 0).all()
    assert torch.equal(out.nll[~ignored], whole.nll[~ignored])
    expected = torch.autograd.grad(whole.nll[~ignored].sum(), weights)
    found = torch.autograd.grad(out.nll.sum(), weights)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="targets from -7 to"):
        lm(tokens, lm.initial_memory(2), targets=targets.masked_fill(ignored, -7))


def test_training_from_python(home, tmp_path, monkeypatch, capsys):
    config = tiny_run_config(home / "data", steps=10, eval_every=0)
    trained = compressive.train(config, tmp_path / "run")
    assert (trained.step, len(trained.generate(TEXT, 7, temperature=0))) == (10, 7)
    with pytest.raises(ValueError, match="holds a run already"):
        compressive.train(config, tmp_path / "run")
    tuned = compressive.train(config, tmp_path / "tuned", start_from=tmp_path / "run")
    assert json.loads((tmp_path / "tuned" / "origin.json").read_text())["source"] == str(tmp_path / "run")
    assert tuned.step == 10
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=20))
    assert compressive.train(longer, tmp_path / "run", resume=True).step == 20
    (tmp_path / "my.toml").write_text(
        f'extends = "wikitext103"\n[data]\ncorpus = "tiny"\ndata_dir = "{home / "data"}"\n[model]\nn_layers = 1\n'
        "d_model = 16\nn_heads = 2\nd_ff = 16\nwindow = 8\nmemory_size = 8\ncompressed_size = 4\nvocab_size = 256\n"
        "adaptive_cutoffs = []\n[train]\nsteps = 2\nbatch = 2\nsample_every = 0\neval_every = 0\n"
    )
    assert compressive.train(tmp_path / "my.toml", tmp_path / "file").config.model.n_layers == 1
    audio = SimpleNamespace(tokenizer=SimpleNamespace(is_audio=True))
    with monkeypatch.context() as patch:
        patch.setattr(Run, "configured_corpus", lambda run: audio)
        with pytest.raises(ValueError, match="is audio: expected text"):
            compressive.train(config, tmp_path / "audio")
    with pytest.raises(ValueError, match="preset='enwik9' does not exist"):
        compressive.train("enwik9", tmp_path / "none")
    monkeypatch.setattr(loop, "train", lambda run, world: loop.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        compressive.train(config, tmp_path / "again")


def test_training_in_a_thread(home, tmp_path):
    """Signals are the main thread's."""
    config = tiny_run_config(home / "data", steps=2, eval_every=0)
    done: list[compressive.TextModel] = []
    thread = threading.Thread(target=lambda: done.append(compressive.train(config, tmp_path / "run")))
    thread.start()
    thread.join()
    assert [model.step for model in done] == [2]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a run"):
        compressive.load("nowhere")
    (tmp_path / "config.json").write_text('{"task": {}}')
    with pytest.raises(ValueError, match="is an agent's run"):
        compressive.load(tmp_path)


def test_help_has_types_and_meanings_and_importing_stays_light():
    code = "import sys, compressive; assert 'torch' not in sys.modules; assert 'load' in dir(compressive)"
    code += "; help(compressive.load)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for words in (
        "source: str | pathlib",
        "-> compressive.api.TextModel",
        "slots of compressed memory per layer",
        "Raises:",
    ):
        assert words in shown
