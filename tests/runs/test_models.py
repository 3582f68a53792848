"""The models that ship with the package: what they are worth, and that their cards tell the truth."""

import json
import math
import re

import numpy as np
import pytest
import torch
from helpers import ROOT

import compressive
from compressive.analysis.memory import measure_memory
from compressive.config.agent import AgentRun
from compressive.data.corpus import Corpus
from compressive.rl.evaluate import compare
from compressive.runs.run import Run
from compressive.runs.shipped import EXCERPT, SHIPPED, shipped_names

TEXT = ("books-small", "enwik8-small")
LARGEST = {"rooms": 8.0}
"""MiB of weights; 16 for models of text."""


def results(preset):
    """The results file of the shipped model of a preset, the newest."""
    return json.loads(sorted((ROOT / "experiments" / "results" / preset).glob("*.json"))[-1].read_text("utf-8"))


def test_these_models_ship():
    assert shipped_names() == sorted([*TEXT, "rooms"])


@pytest.mark.parametrize("name", shipped_names())
def test_weights_are_small_and_have_a_card(name):
    folder = SHIPPED / name
    assert (folder / "model.safetensors").stat().st_size <= LARGEST.get(name, 16.0) * 2**20
    assert (folder / "README.md").read_text("utf-8").startswith(f"# {name}\n")
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".jsonl", ".safetensors", ".md", ".bin"}


@pytest.mark.parametrize("name", TEXT)
def test_a_model_has_the_bits_that_it_was_measured_with(name):
    """On the beginning of the test split, from an empty memory: close to the score of the whole."""
    model = compressive.load(name, device="cpu")
    text = Corpus.open(SHIPPED / name / EXCERPT).split("test")[:16_000]
    bits = model.score(np.asarray(text, np.int64), streams=8).bits
    found = results(name)["test"][0]
    assert math.isclose(bits, found["bits_per_token"], rel_tol=0.06)


@pytest.mark.parametrize("name", TEXT)
def test_compressed_memory_is_worth_bits(name):
    model = compressive.load(name, device="cpu").model
    text = Corpus.open(SHIPPED / name / EXCERPT).split("valid")
    worth = measure_memory(model, text, tokens=8_000, streams=4).compressed_worth
    assert worth is not None
    assert worth.mean > 2 * worth.error > 0


@pytest.mark.parametrize("name", TEXT)
def test_the_card_has_the_figures_of_the_results(name):
    card, found = (SHIPPED / name / "README.md").read_text("utf-8"), results(name)
    assert found["name"] == name
    metric, digits = ("bits_per_character", 4) if name == "enwik8-small" else ("word_perplexity", 2)
    for test in found["test"]:
        assert test["whole_split"]
        assert (
            f"{test['memory_size']} recent and {test['compressed_size']} compressed slots | {test[metric]:.{digits}f} |"
            in card
        )
    assert f"commit {found['trained'][0]['commit']}" in card
    assert re.search(rf"costs {found['memory']['compressed_worth']['mean']:.4f} ±", " ".join(card.split()))
    kept = json.loads((SHIPPED / name / "evaluation" / "test.json").read_text("utf-8"))
    assert kept[metric] == found["test"][0][metric]


@pytest.mark.slow
def test_the_large_model_of_the_repository_is_what_its_card_says():
    """Weights in 8 bits, in several files; it reads 2,048 bytes from an empty memory better than the small one."""
    folder, found = ROOT / "weights" / "enwik8-best", results("enwik8-best")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    assert sum(shard.stat().st_size for shard in shards) == found["bytes"] <= 64 * 2**20
    model = compressive.load(str(folder), device="cpu")
    assert sum(parameter.numel() for parameter in model.model.parameters()) == found["parameters"]
    text = np.asarray(Corpus.open(folder / EXCERPT).split("test")[:2_048], np.int64)
    small = results("enwik8-small")["test"][0]["bits_per_character"]
    assert found["test"][0]["bits_per_character"] / 1.2 < model.score(text, streams=2).bits < small
    card = (folder / "README.md").read_text("utf-8")
    for row in (*found["test"], *found["dynamic"].get("test", [])):
        assert f"| {row['bits_per_character']:.4f} |" in card
    assert f"commit {found['trained'][0]['commit']}" in card


@pytest.mark.parametrize("name", TEXT)
def test_the_preset_of_the_same_name_is_the_one_that_trained_it(name):
    from compressive.config import RunConfig

    preset, trained = RunConfig.from_preset(name), Run.open(SHIPPED / name).config
    assert preset.model == trained.model
    assert preset.train == trained.train


def test_the_agent_remembers_which_object_it_was_shown():
    _, policies = compare("rooms", episodes=32, envs=32, seed=7, device=torch.device("cpu"))
    accuracy = policies["agent"].accuracy
    assert accuracy is not None
    assert accuracy[1] > 0.9  # the interval's lower end; chance is 0.5
    assert policies["agent"].mean > 0.9 * policies["oracle"].mean


def test_the_agent_s_card_has_the_figures_of_the_results():
    card, found = (SHIPPED / "rooms" / "README.md").read_text("utf-8"), results("rooms-small")
    for name, label in (("agent", "rooms"), ("oracle", "oracle"), ("random", "random")):
        scored = found["evaluation"][name]
        assert f"| {label} | {scored['return']:.1f} ± {scored['return_margin_95']:.1f} | " in card
        assert f"| {scored['choice_accuracy']:.1%}" in card
    assert f"commit {found['trained'][0]['commit']}" in card
    tables = json.loads((SHIPPED / "rooms" / "config.json").read_text("utf-8"))
    assert tables == found["config"]
    assert AgentRun.from_preset("rooms-small") == AgentRun.from_tables(tables)
