"""lm-evaluation-harness, the real one, offline: choices, whole documents, generation, our tasks, and the command."""

import dataclasses
import hashlib
import json
import lzma
import math
import os
import re

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # before datasets is imported

import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import ROOT
from training_helpers import command, make_run, text, tiny_run_config

pytest.importorskip("lm_eval")
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

import compressive
from compressive.cli import main
from compressive.data import sources
from compressive.data.corpus import write_corpus
from compressive.data.pg19.words import OFFICIAL, count_words
from compressive.data.tokenizer import BPETokenizer, ByteTokenizer, WordTokenizer
from compressive.harness import TASKS, documents
from compressive.harness.model import CompressiveModel
from compressive.training import loop

pytestmark = pytest.mark.slow
CONTEXT = "the cat sat on a mat and then the dog ran to a red hat"  # more than three windows


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run on a corpus that says it is enwik8."""
    folder = tmp_path_factory.mktemp("home")
    splits = {name: [text(n, i)] for i, (name, n) in enumerate({"train": 4000, "valid": 300, "test": 300}.items())}
    write_corpus(folder / "data" / "tiny", "tiny", ByteTokenizer(), splits, {}, settings={"corpus": "enwik8"})
    loop.train(make_run(folder / "run", tiny_run_config(folder / "data", steps=20, eval_every=20)))
    return folder


@pytest.fixture(scope="module")
def model(home):
    return compressive.load(home / "run", device="cpu")


def lm(home, batch_size: int | str = 4) -> CompressiveModel:
    return CompressiveModel(str(home / "run"), batch_size=batch_size, device="cpu")


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def evaluate(home, tasks, **options):
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=options.pop("metadata", None))
    found = simple_evaluate(
        "compressive", {"path": str(home / "run")}, tasks, batch_size=3, device="cpu", task_manager=manager, **options
    )
    assert found is not None
    return found["results"]


# The three kinds of requests


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_continuations_cost_what_their_tokens_cost_in_the_whole_text(home, model, batch_size):
    pairs = [(CONTEXT[:n], end) for n in (1, 16, 17, 32, 54) for end in (" a", " mat in an old inn by the sea", "x")]
    found = lm(home, batch_size).loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (context, end), (log_p, _) in zip(pairs, found, strict=True):
        expected = -model.score(context + end).nats[len(context) :].sum()
        assert log_p == pytest.approx(expected, abs=1e-4)


def test_greedy_continuations_are_known(home, model):
    best = model.generate(CONTEXT, 20, temperature=0)
    other = best[:-1] + ("q" if best[-1] != "q" else "z")
    found = lm(home).loglikelihood(requests("loglikelihood", (CONTEXT, best), (CONTEXT, other)), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False]


def test_an_empty_context_is_a_line_feed_and_an_empty_continuation_is_certain(home):
    pairs = ("", "the"), ("\n", "the"), ("the", "")
    first, second, third = lm(home).loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert first == pytest.approx(second)
    assert third == (0, True)


def test_what_choices_share_is_read_once(home, monkeypatch):
    harness = lm(home, batch_size=8)
    read = []
    harness.text.model.trunk.register_forward_pre_hook(lambda _, arguments: read.append(tuple(arguments[0].shape[:2])))
    pairs = [(CONTEXT, f" {letter}") for letter in "abcd"]
    harness.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert read == [(1, 16)] * 3 + [(4, len(CONTEXT) + 1 - 48)]


def test_documents_cost_what_evaluate_says(home, model):
    long, short = text(300, 5).decode(), text(40, 6).decode()
    documents = [(short,), (long,), ("q",)]
    found = lm(home).loglikelihood_rolling(requests("loglikelihood_rolling", *documents), disable_tqdm=True)
    assert found == pytest.approx([-model.score(one).nats.sum() for (one,) in documents], rel=1e-6)
    with pytest.raises(ValueError, match="an empty document"):
        lm(home).loglikelihood_rolling(requests("loglikelihood_rolling", ("",)), disable_tqdm=True)


def test_generation_stops(home, model):
    greedy = model.generate(CONTEXT, 40, temperature=0)
    other = model.generate("by the sea", 40, temperature=0)
    stop = greedy[7:9]
    asked = [
        (CONTEXT, {"until": [stop], "max_gen_toks": 40}),
        (CONTEXT, {"until": [], "max_gen_toks": 12}),
        ("by the sea", {"until": "\0", "max_gen_toks": 40}),
    ]
    found = lm(home).generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert found == [greedy.split(stop)[0], greedy[:12], other]


def test_samples_follow_the_seed_of_the_harness(home):
    harness, sampled = lm(home), {"do_sample": True, "temperature": 1.0, "top_k": 50, "max_gen_toks": 20}

    def samples(seed: int) -> list[str]:
        torch.manual_seed(seed)
        asked = requests("generate_until", (CONTEXT, sampled), (CONTEXT, sampled))
        return harness.generate_until(asked, disable_tqdm=True)

    assert samples(1) == samples(1) != samples(2)
    assert len(set(samples(1))) == 2
    first = samples(1)
    del sampled["temperature"]  # that of do_sample alone is 1
    assert samples(1) == first
    with pytest.raises(ValueError, match=r"num_beams: expected until"):
        harness.generate_until(requests("generate_until", ("a", {"num_beams": 4})), disable_tqdm=True)


@pytest.mark.parametrize("tokenizer", [BPETokenizer.train([text(2000, 1)], 300), WordTokenizer.train([text(2000, 1)])])
def test_a_continuation_is_what_the_context_alone_does_not_begin_with(home, tokenizer):
    harness = lm(home)
    harness.text.tokenizer = tokenizer

    def split(context: str, continuation: str) -> tuple[bytes, bytes]:
        tokens, first = harness._split(context, continuation)
        return tokenizer.decode(tokens[:first].tolist()), tokenizer.decode(tokens[first:].tolist()).strip()

    assert split("the cat", " sat on") == (b"the cat", b"sat on")
    assert split("the cat ", "sat on") == (b"the cat", b"sat on")  # the space belongs to the word
    assert split("the cat\n", "sat on") == (b"the cat\n", b"sat on")
    assert split("", "the cat") == (b"\n", b"the cat")
    assert split("the do", "g ran")[1].endswith(b"dog ran")  # one token across the border is scored whole


# Whole evaluations


def test_bits_per_byte_are_those_of_compressive_evaluate(home):
    found = evaluate(home, ["enwik8"], metadata={"enwik8": str(home / "data" / "tiny")})
    printed = command("evaluate", home / "run", "--json", "--device", "cpu")
    expected = json.loads(printed.stdout)["bits_per_character"]
    assert found["enwik8"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-7)


def test_books_are_documents_of_their_own(home, model, tmp_path):
    books = {name: text(100, seed) for seed, name in enumerate(("99", "100", "101"))}
    (tmp_path / "test").mkdir()
    for name, book in books.items():
        (tmp_path / "test" / f"{name}.txt").write_bytes(book)
    found = evaluate(home, ["pg19"], metadata={"pg19": str(tmp_path)})["pg19"]
    nats = sum(model.score(book).nats.sum() for book in books.values())
    assert found["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / sum(map(len, books.values())))
    assert found["word_perplexity,none"] == pytest.approx(math.exp(nats / sum(map(count_words, books.values()))))
    assert documents.pg19(pg19=str(tmp_path))["test"]["name"] == ["99", "100", "101"]


@pytest.mark.parametrize("name", ["enwik8", "enwik8.xz"])
def test_of_enwik8_itself_the_end_is_taken(tmp_path, monkeypatch, name):
    content = text(100, 3)
    known = {"enwik8": hashlib.sha256(content).hexdigest()}
    tiny = dataclasses.replace(sources.PUBLISHED["enwik8"], contents=known, cuts=(90, 110))
    monkeypatch.setitem(sources.PUBLISHED, "enwik8", tiny)
    (tmp_path / name).write_bytes(lzma.compress(content) if name.endswith("xz") else content)
    (document,) = documents.enwik8(enwik8=str(tmp_path / name))["test"]
    assert document["text"].encode() == content[110:]
    assert (document["bytes"], document["words"]) == (len(content) - 110, count_words(content[110:]))
    (tmp_path / name).write_bytes(lzma.compress(b"else") if name.endswith("xz") else b"else")
    with pytest.raises(ValueError, match="is not enwik8 as published"):
        documents.enwik8(enwik8=str(tmp_path / name))


def test_all_official_books_have_the_official_words(tmp_path, monkeypatch):
    (tmp_path / "test").mkdir()
    for name in ("1", "2"):
        (tmp_path / "test" / f"{name}.txt").write_text("one two")
    books = {i: type("Book", (), {"id": i, "split": "test"}) for i in (1, 2)}
    monkeypatch.setattr(documents, "official", lambda: books)
    assert sum(documents.pg19(pg19=str(tmp_path))["test"]["words"]) == pytest.approx(OFFICIAL["test"].words)
    splits = {name: [b"one two\nthree\n"] for name in ("train", "valid", "test")}
    for books_held, words in (({"test/1.txt": "", "test/2.txt": ""}, OFFICIAL["test"].words), ({"test/1.txt": ""}, 3)):
        folder = tmp_path / f"corpus{len(books_held)}"
        write_corpus(folder, "pg19", ByteTokenizer(), splits, books_held, settings={"corpus": "pg19"})
        (document,) = documents.pg19(pg19=str(folder))["test"]
        assert (document["text"], document["words"]) == ("one two\nthree\n", pytest.approx(words))


def test_questions_with_choices_and_answers(home):
    questions = Dataset.from_list([{"question": "the cat sat on a", "choices": ["mat", "qqq"], "answer": 0}])
    common = {"custom_dataset": lambda **_: {"test": questions}, "test_split": "test", "doc_to_text": "{{question}}"}
    choose = common | {"task": "choose", "output_type": "multiple_choice", "doc_to_choice": "choices"}
    answer = common | {"task": "answer", "output_type": "generate_until", "generation_kwargs": {"until": ["."]}}
    found = evaluate(
        home,
        [
            choose | {"doc_to_target": "answer", "metric_list": [{"metric": "acc"}]},
            answer | {"doc_to_target": "mat", "metric_list": [{"metric": "exact_match"}]},
        ],
    )
    assert found["choose"]["acc,none"] == 1
    assert found["answer"]["exact_match,none"] in (0, 1)


def test_the_command_hands_everything_to_lm_eval(home, capsys, monkeypatch):
    arguments = [
        "--model",
        "compressive",
        "--model_args",
        f"path={home / 'run'}",
        "--tasks",
        "enwik8",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(TASKS / "manager.py"))  # theirs take seconds to index
    monkeypatch.setattr(sys, "argv", [])
    assert main(["lm-eval", *arguments, "--metadata", f"enwik8={home / 'data' / 'tiny'}"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    assert main(["lm-eval", *arguments, "--metadata", f"enwik8={home / 'nowhere'}"]) == 2
    assert "say where enwik8 is with --metadata enwik8=PATH" in capsys.readouterr().err


def test_the_example_of_lm_eval_md_runs(home, tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "lm-eval.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "enwik8").symlink_to(home / "run")
    (tmp_path / "enwik8.zip").symlink_to(home / "data" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(TASKS / "manager.py"))
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["results"]["results"]["enwik8"]["bits_per_byte,none"] > 0


def test_unknown_arguments_are_refused(home):
    with pytest.raises(ValueError, match="model_args pretrained: expected path, which"):
        CompressiveModel(str(home / "run"), pretrained="gpt2")


def test_another_corpus_is_not_taken_for_enwik8(home, tmp_path):
    splits = {name: [b"the cat"] for name in ("train", "valid", "test")}
    write_corpus(tmp_path / "enwik8", "enwik8", ByteTokenizer(), splits, {}, settings={"corpus": "text"})
    with pytest.raises(ValueError, match="prepared from text"):
        documents.enwik8(enwik8=str(tmp_path / "enwik8"))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="not UTF-8 at byte 3"):
        documents.pg19(pg19=str(tmp_path))


def test_the_core_does_not_import_it():
    code = "import sys, compressive, compressive.cli; assert not {'lm_eval', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
