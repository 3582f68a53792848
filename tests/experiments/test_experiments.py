"""What every experiment measures, tabulates and plots, on two runs of a few steps."""

import json

import pytest
from helpers import ROOT
from training_helpers import make_run, tiny_corpus, tiny_run_config

from compressive.config.model import transformer
from compressive.experiments import EXPERIMENTS, load
from compressive.experiments.compression_functions import FUNCTIONS, _at_best_rate
from compressive.experiments.experiment import Measured, prepare_corpus
from compressive.training import loop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A Compressive Transformer and a TransformerXL, hardly trained."""
    home = tmp_path_factory.mktemp("experiments")
    tiny_corpus(home / "data")
    quick = {"steps": 4, "warmup_steps": 1, "decay_steps": 3, "eval_every": 0}
    found = []
    for name, size in (("compressive", 8), ("txl", 0)):
        found.append(make_run(home / name, tiny_run_config(home / "data", {"compressed_size": size}, **quick)))
        assert loop.train(found[-1]) == loop.FINISHED
    return found


def keys(content):
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from keys(value)
    if isinstance(content, dict):
        yield from content


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "recall"])  # whose corpus is its own
def test_an_experiment_measures_tabulates_and_plots(name, runs, tmp_path):
    experiment = load(name)
    found = {
        size > 0: json.loads(json.dumps(experiment.measure(run, "tiny")))
        for run, row in zip(runs, (*experiment.rows("tiny"), None), strict=False)
        if row is not None and isinstance(size := run.config.model.compressed_size, int)
    }
    assert not [key for one in found.values() for key in keys(one) if " " in key]
    rows = [
        Measured(row, {0: found[compresses], 1: found[compresses]})
        for row in experiment.rows("tiny")
        if (compresses := bool(transformer(row.config.model).compressed_size)) in found
    ]
    assert len(rows) == len(experiment.rows("tiny"))
    table = experiment.table(rows).splitlines()
    assert len({line.count(" | ") for line in table}) == 1
    assert len(table) > 3
    assert "–" not in table[2].split(" | ")[-2]
    verdicts = experiment.verdicts(rows)
    assert all("seeds differ by up to 0.0000" in verdict for verdict in verdicts)
    experiment.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"

    # The same with a row that is not measured yet.
    some = [rows[0], *(Measured(row.row, {}) for row in rows[1:])]
    assert len(experiment.table(some).splitlines()) == len(table)
    assert len(rows) == 1 or any("not measured yet" in verdict for verdict in experiment.verdicts(some))
    experiment.plot(some, tmp_path / "some.png")


def test_the_best_rate_is_chosen_on_validation_among_rows_with_most_seeds():
    experiment = load("compression-functions")
    bits = {"function-max-rate2": [1.2, 1.2], "function-max-rate3": [1.3, 1.0], "function-max-rate4": [0.9]}
    rows = [
        Measured(row, dict(enumerate({"valid": {"bits_per_byte": one}} for one in bits.get(row.name, ()))))
        for row in experiment.rows("small")
    ]
    chosen = _at_best_rate(rows)
    assert list(chosen) == list(FUNCTIONS)
    assert chosen["max"].row.name == "function-max-rate3"
    assert not chosen["conv"].runs


def test_bptt_reads_as_many_tokens_with_half_the_batch():
    rows = {row.name: row.config for row in load("compression-functions").rows("paper")}
    bptt, conv = rows["function-conv-bptt-rate3"], rows["function-conv-rate3"]
    assert (bptt.train.unroll, bptt.train.batch) == (2, conv.train.batch // 2)
    assert len([name for name in rows if "rate3" in name]) == 10
    assert len(rows) == 7 * 3 + 3


def test_the_paper_s_scale_has_the_paper_s_sizes():
    ours, equal, paper = (transformer(row.config.model) for row in load("enwik8").rows("paper"))
    assert (ours.window, ours.memory_size, ours.compressed_size, ours.compression_rate) == (768, 768, 1152, 3)
    assert (equal.memory_size, equal.compressed_size, paper.memory_size) == (1920, 0, 2304)
    subwords, txl = (transformer(row.config.model) for row in load("subwords").rows("paper"))
    assert (subwords.n_layers, subwords.compression_rate, txl.memory_size) == (36, 2, 1024)


def test_the_books_of_the_repository_are_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    prepare_corpus("books", tmp_path)
    assert json.loads((tmp_path / "books" / "manifest.json").read_text())["tokenizer"] == "bytes"
    prepare_corpus("books", tmp_path)  # leaves it as it is
