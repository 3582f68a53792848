"""What every experiment measures, tabulates and plots, on two runs of a few steps."""

import functools
import json
import math
import re

import pytest
from helpers import ROOT
from training_helpers import make_run, tiny_corpus, tiny_run_config

from compressive.config.model import transformer
from compressive.data.corpus import Corpus, write_corpus
from compressive.data.tokenizer import WordTokenizer
from compressive.experiments import EXPERIMENTS, load, samples
from compressive.experiments.compression_functions import FUNCTIONS, _at_best_rate
from compressive.experiments.experiment import Measured, prepare_corpus
from compressive.experiments.samples import mentions, names
from compressive.experiments.schedule import PLANS, Plan, summarise
from compressive.experiments.words import PAPER
from compressive.training import loop
from compressive.training.schedule import learning_rate, steps_per_update

pytestmark = pytest.mark.slow

OWN = ("recall", "words", "schedule", "samples", "speech", "agent", "agent-delays")
"""Experiments that need other runs than those of these tests, with a corpus or a length of their own."""


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


@pytest.fixture(scope="module")
def measured(runs):
    """What an experiment measures of both runs, as JSON has it; measured once."""

    @functools.cache
    def measure(name):
        experiment = load(name)
        wanted = {bool(transformer(row.config.model).compressed_size) for row in experiment.rows("tiny")}
        kinds = {bool(transformer(run.config.model).compressed_size): run for run in runs}
        return {kind: json.loads(json.dumps(experiment.measure(kinds[kind], "tiny"))) for kind in wanted}

    return measure


def keys(content):
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from keys(value)
    if isinstance(content, dict):
        yield from content


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in OWN])
def test_an_experiment_measures_tabulates_and_plots(name, measured, tmp_path):
    experiment, found = load(name), measured(name)
    assert not [key for one in found.values() for key in keys(one) if " " in key]
    kinds = [(row, bool(transformer(row.config.model).compressed_size)) for row in experiment.rows("tiny")]
    rows = [Measured(row, {0: found[compresses], 1: found[compresses]}) for row, compresses in kinds]
    table = experiment.table(rows).splitlines()
    assert len({line.count(" | ") for line in table}) == 1
    assert len(table) > 3
    assert "–" not in table[2].split(" | ")[-2]
    verdicts = experiment.verdicts(rows)
    assert all(re.search(r"seeds differ by up to 0\.0+:", verdict) for verdict in verdicts)
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


def test_wikitext_s_size_is_chosen_on_validation_and_dynamic_evaluation_is_another_score(measured):
    compressive, txl = (measured("wikitext")[compresses] for compresses in (True, False))
    for found in (compressive, txl):
        chosen = min(found["valid"], key=lambda one: one["bits"])["slots"]
        assert [found[test]["slots"] for test in ("test_as_chosen", "test_dynamic")] == [chosen, chosen]
        assert found["test_dynamic"]["bits"] < found["test_as_chosen"]["bits"]  # a model of four steps learns on
        assert [one["slots"] for one in found["valid"]] == [32, 48, 64, 96, 128, 160]
    assert [one["empty_memory"] for one in compressive["valid"]] == [
        "masked"
    ] * 6  # larger than the 8 slots of training
    assert (compressive["test_as_trained"]["slots"], txl["test_as_trained"]["slots"]) == (24, 16)


def test_words_are_scored_by_frequency(tmp_path):
    train = b"a " * 10_001 + b"b " * 10_000 + b"c " * 999 + b"d " * 99
    texts = {"train": train, "valid": b"a b " * 20, "test": b"a a a a b b b c c d " * 20}
    tokenizer = WordTokenizer.train([texts["train"]])
    write_corpus(tmp_path / "data" / "tiny", "tiny", tokenizer, {name: [text] for name, text in texts.items()}, {})
    quick = {"steps": 1, "batch": 2, "warmup_steps": 1, "eval_every": 0}
    run = make_run(tmp_path / "run", tiny_run_config(tmp_path / "data", {"vocab_size": 6}, **quick))
    assert loop.train(run) == loop.FINISHED
    found = load("words").measure(run, "tiny")
    words = {bucket: one["words"] for bucket, one in found.items()}
    assert words == {"all": 201, ">10K": 80, "1K-10K": 60, "100-1K": 40, "<100": 21}  # with the end of the line
    nats = {bucket: one["nats"] for bucket, one in found.items()}
    whole = sum(words[bucket] * nats[bucket] for bucket in nats if bucket != "all")
    assert nats["all"] == pytest.approx(whole / words["all"])


def test_the_paper_s_perplexities_give_the_paper_s_gains(tmp_path):
    experiment = load("words")
    ours, txl = (
        {bucket: {"words": 10, "nats": math.log(pair[which])} for bucket, pair in PAPER.items()} for which in (1, 0)
    )
    rows = [
        Measured(row, {0: found, 1: found}) for row, found in zip(experiment.rows("tiny"), (ours, txl), strict=True)
    ]
    gains = [line.split(" | ")[-1].split(" ")[0] for line in experiment.table(rows).splitlines()[2:]]
    assert gains == ["2.6", "9.5", "19.0", "19.9", "5.8"]
    assert [verdict.rsplit(" ")[-1] for verdict in experiment.verdicts(rows)] == ["lower."] * 5 + ["higher."]
    experiment.plot(rows, tmp_path / "plot.png")

    some = [rows[0], Measured(rows[1].row, {})]
    assert all("not measured yet" in verdict for verdict in experiment.verdicts(some))
    assert len(experiment.table(some).splitlines()) == 7
    experiment.plot(some, tmp_path / "some.png")


def test_ten_times_the_loss_is_one_power_of_ten():
    experiment = load("layers-words")
    found = [{"layers": {"1": {"mean": 0.2 * factor}, "2": {"mean": 0.4 * factor}}} for factor in (1, 0.1)]
    rows = [Measured(row, {0: one, 1: one}) for row, one in zip(experiment.rows("tiny"), found, strict=True)]
    assert experiment.verdicts(rows)[0].startswith(
        "The loss on words against that on bytes: +1.00 ± 0.00 powers of ten"
    )
    assert "| mean | 0.3000 (0.3000 to 0.3000) | 0.0300 (0.0300 to 0.0300) |" in experiment.table(rows)


@pytest.mark.parametrize("scale", PLANS)
def test_schedules_are_the_same_up_to_the_change_and_differ_after_it(scale):
    plan = PLANS[scale]
    configs = {row.name.removeprefix("schedule-"): row.config.train for row in load("schedule").rows(scale)}
    peak = configs["txl-held"].learning_rate

    def at(step):
        return {
            name: (round(learning_rate(step, one) / peak, 9), steps_per_update(step, one))
            for name, one in configs.items()
        }

    for step in (0, plan.warmup // 2, plan.warmup, plan.change - 1):
        assert len({value for name, value in at(step).items() if "cosine" not in name}) == 1
    for step in (plan.change, plan.steps - 1):
        found = at(step)
        assert found["txl-held"] == found["compressive-held"] == (1, 1)
        assert found["txl-every4"] == found["compressive-every4"] == (1, 4)
        assert found["txl-zero"] == found["compressive-zero"] == (0, 1)
        assert found["txl-tenth"] == (0.1, 1)
        assert (found["txl-cosine"][0], 4) == found["txl-cosine-every4"]
        assert 0 < found["txl-cosine"][0] < 0.7


def test_schedules_are_summarised_before_and_after_the_change_and_compared_seed_by_seed(tmp_path):
    experiment, plan = load("schedule"), Plan(steps=8, warmup=1, change=5, log_every=1)
    speeds = (9, 9, 10, 10, 10, 5, 5, 5)
    records = [
        {"step": step, "bits": 8.0 - step, "tokens_per_second": speed, "peak_gib": 1.0}
        for step, speed in enumerate(speeds, start=1)
    ]
    found = summarise(records, plan)
    assert (found["before"], found["after"], found["speed"]) == (4.0, 1.0, 0.5)  # steps 3 to 5, and 6 to 8
    assert found["curve"][-1] == {"step": 8, "bits": 0.0}

    def measured(row, seed):
        worse = 0.5 * ("zero" in row.name) - 0.1 * ("every4" in row.name)
        one = found | {"after": found["after"] + seed + worse, "test": {"bits_per_byte": 2 + seed + worse}}
        return one | {"curve": [{"step": step, "bits": 2 - step / 1000} for step in range(4, 301, 4)]}

    rows = [Measured(row, {seed: measured(row, seed) for seed in (0, 1)}) for row in experiment.rows("tiny")]
    verdicts = [verdict.rstrip(".").rsplit(" ", 1)[-1] for verdict in experiment.verdicts(rows)]
    assert verdicts == ["higher", "higher", "inconclusive", "lower", "lower", "lower", "lower", "lower", "lower"]
    assert experiment.table(rows).count("\n") == 11
    experiment.plot(rows, tmp_path / "plot.png")
    some = [rows[0], *(Measured(row.row, {}) for row in rows[1:])]
    assert all("not measured yet" in verdict for verdict in experiment.verdicts(some))
    experiment.plot(some, tmp_path / "some.png")


@pytest.mark.parametrize(
    ("scale", "reason", "said"),
    [("tiny", None, "no: not PG-19's test books"), ("small", "38 of 100 books", "no: 38 of 100 books"),
     ("paper", None, "yes")],
)  # fmt: skip
def test_perplexities_of_some_books_are_marked_as_not_comparable(scale, reason, said):
    experiment = load("pg19")
    score = {"word_perplexity": 1234.5, "bits_per_byte": 1.5, "not_comparable": reason}
    rows = [Measured(row, {0: {"valid": score, "test": score}}) for row in experiment.rows(scale)]
    assert all(line.endswith(f"| 1,234.5 | 1.5000 | {said} |") for line in experiment.table(rows).splitlines()[2:])


def test_names_are_found_in_the_middle_of_sentences():
    prompt = (ROOT / "books" / "prompts" / "860-baby-mine.txt").read_text("utf-8")
    assert names(prompt) == {"Alfred", "Hardy", "Jimmy", "Jinks"}
    assert mentions('"Jimmy," said she. Alfred\'s hat--Hardy! A jinks', {"Alfred", "Jimmy", "Hardy"}) == [0, 3, 4]


def test_samples_continue_the_prompts_and_count_their_names(runs, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(samples, "LENGTH", {"tiny": 30})
    experiment = load("samples")
    found = json.loads(json.dumps(experiment.measure(runs[0], "tiny")))
    assert len(found) == 2
    for prompt, one in found.items():
        assert [set(sample["mentions"]) for sample in one["samples"]] == [set(found)] * 4
        assert len({sample["text"] for sample in one["samples"]}) > 1
        for sample in one["samples"]:  # as if the model had written this
            sample |= {"words": 500, "mentions": {other: [7] * (other == prompt) for other in found}}
    rows = [Measured(experiment.rows("tiny")[0], {0: found, 1: found})]
    assert all(" | 2.0 (2.0 to 2.0) | 0.0 (0.0 to 0.0) | " in line for line in experiment.table(rows).splitlines()[2:])
    assert experiment.verdicts(rows)[0].endswith("+2.0 ± 0.0 per 1,000 words, seeds differ by up to 0.0: higher.")
    experiment.plot(rows, tmp_path / "plot.png")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="root of the repository"):
        experiment.prepare("tiny", tmp_path)


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
    words, txl = (transformer(row.config.model) for row in load("wikitext").rows("paper"))
    assert (words.window, words.memory_size, words.compressed_size, words.compression_rate) == (512, 512, 512, 4)
    assert (words.adaptive_cutoffs, txl.memory_size) == ((20000, 60000), 1024)
    subwords, txl = (transformer(row.config.model) for row in load("pg19").rows("paper"))
    assert (subwords.n_layers, subwords.compression_rate, txl.memory_size) == (36, 2, 1024)


def test_the_books_of_the_repository_are_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    prepare_corpus("books", tmp_path)
    assert json.loads((tmp_path / "books" / "manifest.json").read_text())["tokenizer"] == "bytes"
    prepare_corpus("books", tmp_path)  # leaves it as it is
    prepare_corpus("books-words", tmp_path)
    words = Corpus.open(tmp_path / "books-words")
    assert {row.config.model.vocab_size for row in load("wikitext").rows("tiny")} == {words.vocab_size}
    assert words.tokenizer.decode(words.split("train")[:100]).count(b"<unk>") > 1
