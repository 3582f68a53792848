"""Reports of speech and of agents, and what all reports are made of."""

import html
import json
import re
import shlex

import numpy as np
import pytest
import torch
from rl_helpers import tiny_agent_run
from speech_helpers import tiny_speech, tiny_speech_config, tiny_wavenet
from training_helpers import make_run

from compressive.analysis.memory import Passage
from compressive.analysis.report.drawing import memory_drawing, sentence
from compressive.analysis.report.passages import pieces, wave
from compressive.cli import main
from compressive.config import ModelConfig
from compressive.data.corpus import Corpus
from compressive.data.tokenizer import ByteTokenizer
from compressive.evaluation.score import score
from compressive.rl import loop as rl_loop
from compressive.rl.run import AgentFolder
from compressive.runs.run import Run
from compressive.runs.trained import Trained
from compressive.training import loop

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    home = tmp_path_factory.mktemp("my speech")
    tiny_speech(home / "data")
    for name, model in {"compressive": None, "wavenet": tiny_wavenet(window=40)}.items():
        run = make_run(home / name, tiny_speech_config(home / "data", model, sample_every=12, sample_tokens=50))
        assert loop.train(run) == loop.FINISHED
    return home


def read(folder):
    page = (folder / "report.html").read_text("utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:|#)|url\((?!#)|@import|https?://', page)
    return page, json.loads((folder / "report.json").read_text("utf-8"))


def test_the_report_of_speech_stands_beside_its_floors(speech, capsys):
    assert main(["analyze", str(speech / "compressive"), "report"]) == 0
    page, numbers = read(speech / "compressive")
    corpus = Corpus.open(speech / "data" / "tiny")
    trained = Trained.load(Run.open(speech / "compressive"))
    nats = score(trained.model(trained.config), corpus.split("test"), streams=numbers["test"]["samples"] // 160,
                 clips=corpus.starts("test"))  # fmt: skip
    assert numbers["test"]["whole"]
    assert numbers["test"]["bits_per_sample"] == pytest.approx(nats.mean() / np.log(2), abs=1e-4)
    assert set(numbers["floors_bits_per_sample"]) == {"unigram", "bigram", "linear_prediction"}
    assert f"<h1>{numbers['verdict']}</h1>" in page
    assert page.count("data:audio/wav;base64,") == 1
    assert page.count('aria-label="wave"') == 2
    assert "standard error over clips" in page
    assert "20 slots = 80 samples" in page
    assert f"compressive generate {shlex.quote(str(speech / 'compressive'))} --out" in html.unescape(page)
    assert numbers["verdict"] in capsys.readouterr().out


def test_the_report_of_a_wavenet_has_no_compressed_memory(speech, tmp_path):
    assert main(["analyze", str(speech / "wavenet"), "report", "--out", str(tmp_path), "--test-tokens", "700"]) == 0
    page, numbers = read(tmp_path)
    assert "compressed_memory_is_worth" not in numbers
    assert 'id="by-gain"' not in page
    assert "the first 700 samples of the test split" in page
    assert "receptive field" in page


@pytest.mark.slow
def test_the_report_of_an_agent_stands_beside_chance(tmp_path):
    run = AgentFolder.begin(tmp_path / "an agent", tiny_agent_run(), resume=False)
    assert rl_loop.train(run) == 0
    assert main(["analyze", str(run.folder), "report", "--episodes", "4"]) == 0
    page, numbers = read(run.folder)
    assert set(numbers["policies"]) == {"agent", "random", "oracle"}
    assert numbers["policies"]["agent"]["episodes"] >= 4
    assert page.count("data:image/gif;base64,") == 1
    assert "95 % interval of the mean" in page
    assert f"compressive rl watch '{run.folder}' --out" in html.unescape(page)
    for words in ("compressive rl evaluate", "seed", "machine", "commit"):
        assert words in page


def test_a_character_of_several_bytes_has_their_sum():
    passage = Passage(32, list("aé".encode()), [1.0, 2.0, 3.5], [0.1, 0.2, 0.3], "x")
    found = list(pieces(passage, ByteTokenizer()))
    assert [(piece.text, piece.bits) for piece in found] == [("a", 1.0), ("é", 5.5)]
    assert found[1].gain == pytest.approx(0.5)


def test_a_wave_has_one_column_for_each_stretch():
    samples = np.round(1000 * np.sin(np.arange(1000) / 9)).astype(np.int16)
    drawn = wave(samples, [2.5] * 1000, None, 24_000)
    assert drawn.count("<rect") == 240
    assert drawn.count('class="s3"') == 240
    assert "2.50 bits per sample" in drawn


@pytest.mark.parametrize(
    ("sizes", "shown", "hidden"),
    [
        ({"memory_size": 512, "compressed_size": 1152, "compression_rate": 4}, "1,152 slots = 4,608 tokens", "nothing"),
        ({"memory_size": 512, "compressed_size": 0}, "512 tokens", "compressed memory"),
        ({"memory_size": 0, "compressed_size": 0}, "768 tokens", "recent memory"),
        ({"memory_size": (8, 16), "compressed_size": (0, 4)}, "4 slots = 16 tokens", "nothing"),
    ],
)
def test_the_drawing_has_the_sizes_of_the_model(sizes, shown, hidden):
    config = ModelConfig(n_layers=2, window=768, **sizes)
    drawn, words = memory_drawing(config), sentence(config)
    assert shown in drawn
    assert hidden not in drawn
    assert f"all layers together, {config.temporal_range:,}." in words


def test_a_run_without_a_checkpoint_cannot_be_reported(tmp_path, capsys):
    tiny_speech(tmp_path / "data")
    make_run(tmp_path / "run", tiny_speech_config(tmp_path / "data"))
    torch.manual_seed(0)
    assert main(["analyze", str(tmp_path / "run"), "report"]) == 2
    assert "checkpoint" in capsys.readouterr().err
