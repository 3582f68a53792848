"""The experiment on speech: equal sizes, equal samples, curves over samples and seconds."""

import dataclasses
import json

import pytest
from speech_helpers import tiny_speech, tiny_speech_config, tiny_wavenet
from training_helpers import make_run

from compressive.config import RunConfig, transformer
from compressive.experiments import load
from compressive.experiments.experiment import SCALES, Measured, cost
from compressive.experiments.speech import equal_seconds
from compressive.training import loop


@pytest.mark.parametrize("scale", SCALES)
def test_the_three_models_have_equal_sizes_samples_and_updates(scale):
    configs = [row.config for row in load("speech").rows(scale)]
    costs = [cost(config, scale) for config in configs]
    assert max(of.parameters for of in costs) / min(of.parameters for of in costs) < 1.02
    assert len({of.tokens for of in costs}) == 1
    assert len({config.train.steps // config.train.update_every for config in configs}) == 1
    assert len({config.train.steps / config.train.eval_every for config in configs}) == 1
    ours, xl = transformer(configs[0].model), transformer(configs[1].model)
    slots = [size + compressed for size, compressed in zip(ours.memory_sizes, ours.compressed_sizes, strict=True)]
    assert tuple(slots) == xl.memory_sizes


def test_the_paper_s_scale_is_the_presets():
    for row, preset in zip(load("speech").rows("paper"), ("speech", "speech-txl", "speech-wavenet"), strict=True):
        train = dataclasses.replace(row.config.train, eval_test=False)
        assert dataclasses.replace(row.config, train=train) == RunConfig.from_preset(preset)


@pytest.mark.slow
def test_a_run_is_measured_tabulated_and_plotted(tmp_path):
    experiment, found = load("speech"), []
    tiny_speech(tmp_path / "data")
    for name, model in (("transformer", None), ("wavenet", tiny_wavenet())):
        config = tiny_speech_config(tmp_path / "data", model, eval_test=True)
        run = make_run(tmp_path / name, config)
        assert loop.train(run) == loop.FINISHED
        found.append(json.loads(json.dumps(experiment.measure(run, "tiny"))))
        points = found[-1]["curve"]
        assert [point["samples"] for point in points] == [6 * 4 * 40, 12 * 4 * 40]
        assert points[1]["seconds"] == pytest.approx(12 * 4 * 40 / found[-1]["samples_per_second"])
        assert found[-1]["test"]["samples"] == len(run.corpus().split("test"))
        assert found[-1]["test"]["bits"] < 8
    transformer, wavenet = found
    assert transformer["linear_prediction"] == wavenet["linear_prediction"]
    rows = [
        Measured(row, {0: one, 1: one})
        for row, one in zip(experiment.rows("tiny"), (transformer, transformer, wavenet), strict=True)
    ]
    table = experiment.table(rows).splitlines()
    assert len(table) == 6
    assert len({line.count(" | ") for line in table}) == 1
    assert all("seeds differ by up to 0.000" in verdict for verdict in experiment.verdicts(rows))
    experiment.plot(rows, tmp_path / "plot.png")
    experiment.plot([rows[0], *(Measured(row.row, {}) for row in rows[1:])], tmp_path / "some.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_equal_seconds_are_read_from_the_curves():
    experiment = load("speech")

    def measured(speed, last):  # 80 samples, one evaluation in the middle and one at the end
        curve = [{"samples": n, "seconds": n / speed, "bits": bits} for n, bits in ((40, 6.0), (80, last))]
        return {"curve": curve, "test": {"bits": last}}

    rows = [
        Measured(row, {0: one, 1: one})
        for row, one in zip(
            experiment.rows("tiny"), (measured(2, 4.0), measured(1, 4.0), measured(8, 5.0)), strict=True
        )
    ]
    assert equal_seconds(rows) == 10
    verdicts = experiment.verdicts(rows)
    assert verdicts[0].startswith("Compressive Transformer, equal samples, against TransformerXL: +0.000")
    assert verdicts[1].startswith("Compressive Transformer, equal samples, against WaveNet: -1.000")
    assert verdicts[2].startswith("Compressive Transformer, equal seconds, against TransformerXL: -0.500")  # 7, 7.5
    assert verdicts[3].startswith("Compressive Transformer, equal seconds, against WaveNet: +2.000")
    assert [verdict.rsplit(" ", 1)[-1] for verdict in verdicts] == ["inconclusive.", "lower.", "lower.", "higher."]
