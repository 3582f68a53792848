"""The recall experiment: its stream, what is measured of answers, table and picture, and that a model learns it."""

import numpy as np
import pytest

from compressive.config import transformer
from compressive.data.corpus import Corpus
from compressive.experiments import recall
from compressive.experiments.experiment import Measured
from compressive.experiments.recall import ANSWER, CHANCE, KEYS, PAIR, QUESTION, SIZES, VALUES, Answers, Recall
from compressive.runs.run import Run
from compressive.training import loop

TINY = SIZES["tiny"]


@pytest.fixture(scope="module")
def data():
    return np.frombuffer(recall.stream(60_000, TINY, 5), np.uint8)


def events(data):
    """Yield the place of every question with that of its pair, found by looking back byte by byte."""
    for place in np.flatnonzero((data >= QUESTION) & (data < ANSWER)):
        pairs = np.flatnonzero((data[:place] >= PAIR) & ((data[:place] - PAIR) // VALUES == data[place] - QUESTION))
        yield int(place), pairs


def test_every_question_has_one_pair_in_sight_and_its_value_is_the_answer(data):
    places, distances = recall.questions(data)
    found = dict(zip(places.tolist(), distances.tolist(), strict=True))
    count = 0
    for place, pairs in events(data):
        if place + 1 == len(data):
            continue
        assert place - pairs[-1] == found[place] <= TINY.furthest
        assert (data[pairs[-1]] - PAIR) % VALUES == data[place + 1] - ANSWER
        assert len(pairs) == 1 or place - pairs[-2] > TINY.reach  # an older pair of the key: beyond every model
        between = data[pairs[-1] + 1 : place]
        assert not (between == data[place]).any()  # the key is asked for once
        count += 1
    assert count == len(found) > 4_000


def test_distances_cover_the_whole_range_evenly_in_their_logarithm(data):
    _, distances = recall.questions(data)
    assert distances.min() == 1
    assert distances.max() == TINY.furthest
    middle = round(np.sqrt(TINY.furthest))
    assert (distances <= middle).mean() == pytest.approx(0.5, abs=0.06)


def test_values_cannot_be_guessed_and_keys_are_all_used(data):
    values, keys = (data[data >= PAIR] - PAIR) % VALUES, (data[data >= PAIR] - PAIR) // VALUES
    assert np.bincount(values).max() / len(values) == pytest.approx(CHANCE, abs=0.02)
    assert len(np.unique(keys)) == KEYS


def test_a_stream_is_the_same_for_the_same_seed():
    assert recall.stream(500, TINY, [0, 1]) == recall.stream(500, TINY, [0, 1])
    assert recall.stream(500, TINY, [0, 1]) != recall.stream(500, TINY, [0, 2])


def test_questions_without_pair_or_answer_are_left_out():
    pair, question = PAIR + VALUES * 3 + 2, QUESTION + 3
    places, distances = recall.questions(np.array([question, 82, pair, 0, question, 82, 0, question], np.uint8))
    assert places.tolist() == [4]
    assert distances.tolist() == [2]


def every_question(config, knows):
    """Answers to every distance at every offset, right as `knows` says, and else in one of eight cases."""
    distance, offset = (x.ravel() for x in np.mgrid[1 : TINY.furthest + 1, : config.window])
    distance, offset = np.repeat(distance, VALUES), np.repeat(offset, VALUES)
    return Answers(distance, offset, knows(distance - offset) | (np.arange(len(distance)) % VALUES == 0))


@pytest.mark.parametrize("row", Recall().rows("tiny")[:5], ids=lambda row: row.name)
def test_a_model_that_knows_all_it_sees_has_the_reach_of_the_formula(row):
    config = transformer(row.config.model)
    found = recall.summarise(every_question(config, lambda far: far <= config.temporal_range), config, TINY.furthest)
    # The last part of the curve ends before the furthest distance, where this model only guesses.
    assert found["reach"] == pytest.approx(found["formula"], abs=1e-9)
    assert found["uncompressed"]["accuracy"] == 1
    assert found["gone"]["accuracy"] == CHANCE
    assert found["compressed"]["accuracy"] == (1 if any(config.compressed_sizes) else None)
    guessed = recall.summarise(every_question(config, lambda far: far < -100), config, TINY.furthest)
    assert guessed["reach"] == pytest.approx(-(config.window - 1) / 2)


def test_rows_have_equal_slots_and_the_reach_of_the_formula():
    models = {row.name: transformer(row.config.model) for row in Recall().rows("tiny")}
    assert {model.memory_sizes[0] + model.compressed_sizes[0] for model in models.values()} == {2 * TINY.slots}
    reach = {name.removeprefix("recall-"): model.temporal_range // TINY.slots for name, model in models.items()}
    assert reach == {
        "txl": 2, "rate1": 2, "rate2": 3, "rate4": 5, "rate8": 9, "mean": 9, "max": 9, "most-used": 9,
        "autoencoding": 9, "txl-2-layers": 4,
    }  # fmt: skip


def test_table_and_picture_of_a_part_of_the_rows(tmp_path):
    experiment, rows = Recall(), []
    for row in Recall().rows("tiny"):
        config = transformer(row.config.model)
        answers = every_question(config, lambda far, known=40 if config.n_layers == 1 else 48: far <= known)
        found = recall.summarise(answers, config, TINY.furthest)
        rows.append(Measured(row, {} if row.name == "recall-mean" else {0: found, 1: found}))
    table = experiment.table(rows)
    assert "| rate 8 | 16 + 16 at rate 8 | 144 | 40.0 (40.0 to 40.0) |" in table
    assert "| TransformerXL | 32 | 32 |" in table
    assert "| rate 8, mean | 16 + 16 at rate 8 | 144 | – | – | – | – |" in table
    verdicts = experiment.verdicts(rows)
    assert "rate 8, mean against rate 8: not measured yet." in verdicts
    assert verdicts[-1].endswith("against TransformerXL: +8.0 ± 0.0 bytes of reach, seeds differ by up to 0.0: higher.")
    experiment.plot(rows, tmp_path / "recall.png")
    assert (tmp_path / "recall.png").stat().st_size > 20_000
    experiment.plot([row for row in rows if row.row.name == "recall-txl"], tmp_path / "part.png")
    assert (tmp_path / "part.png").exists()


def test_the_corpus_is_written_once_and_a_run_is_measured(tmp_path, monkeypatch):
    """A few steps of training teach nothing: what is measured is chance, everywhere."""
    monkeypatch.setitem(recall.SIZES, "tiny", TINY._replace(steps=3, batch=4, d_model=32, test_bytes=20_000))
    experiment = Recall()
    experiment.prepare("tiny", tmp_path)
    corpus = Corpus.open(tmp_path / "recall-tiny")
    written = (corpus.folder / "manifest.json").stat().st_mtime_ns
    experiment.prepare("tiny", tmp_path)
    assert (corpus.folder / "manifest.json").stat().st_mtime_ns == written
    row = {row.name: row for row in experiment.rows("tiny")}["recall-rate4"]
    run = Run.begin(tmp_path / "run", row.seeded(0, tmp_path, "cpu"), False)
    assert loop.train(run) == loop.FINISHED
    found = experiment.measure(run, "tiny")
    asked = sum(found[place]["questions"] for place in ("uncompressed", "compressed", "gone"))
    assert 0.6 < asked / len(recall.questions(np.asarray(corpus.split("test")))[0]) < 1  # after memories are full
    assert found["gone"]["accuracy"] < 3 * CHANCE
