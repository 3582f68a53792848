"""What a run takes over before its first step, and what it is said to need."""

import dataclasses

import pytest
import torch
from training_helpers import tiny_corpus, tiny_run_config

from compressive.architectures import build_model
from compressive.config import LearnConfig, ModelConfig, RunConfig, preset_names
from compressive.data.corpus import Corpus
from compressive.distributed import World
from compressive.training.preflight import estimate, fit, fit_device, micro_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    "model", [{}, {"attention_dropout": 0.1, "dropout": 0.1}, {"norm": "pre"}, {"compression": "most_used"}]
)
def test_activations_are_those_that_a_forward_pass_keeps(model, tmp_path):
    config = tiny_run_config(tmp_path, model)
    real = build_model(config.model).train()
    kept: list[torch.UntypedStorage] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage())
        return tensor

    x = real.embedding(torch.zeros(4, config.model.window, dtype=torch.long))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = real.trunk(x, real.initial_memory(4))
    weights = {parameter.data_ptr() for parameter in real.parameters()}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in kept if storage.data_ptr() not in weights}
    need = estimate(config, CPU, 4)
    assert need.activations == sum(sizes.values())
    assert need.weights == 4 * 4 * sum(parameter.numel() for parameter in real.parameters())
    slots = sum(tensor.nbytes for tensor in out.memory.state_dict().values())
    assert need.memory == 2 * slots


def test_micro_batches_need_less_for_activations_alone(tmp_path):
    config = tiny_run_config(tmp_path)
    whole, parts = estimate(config, CPU, 4), estimate(config, CPU, 4, 1)
    assert (parts.weights, parts.memory) == (whole.weights, whole.memory)
    assert parts.activations < 0.3 * whole.activations


def test_a_micro_batch_is_estimated_from_the_memory_that_is_there(tmp_path, monkeypatch):
    config = tiny_run_config(tmp_path, batch=12, micro_batch="auto")
    need = estimate(config, CPU, 12)

    def rows(activations):
        there = (need.weights + need.memory + activations * need.activations) / 0.75 / 2**30
        monkeypatch.setattr("compressive.training.preflight.memory_gib", lambda device: there)
        return micro_batch(config, World(), 12)

    assert [rows(share) for share in (2, 1.01, 0.99, 0.51, 0.43, 0.26, 0)] == [12, 12, 6, 6, 4, 3, 1]
    given = tiny_run_config(tmp_path, batch=12, micro_batch=100)
    assert (micro_batch(given, World(), 12), micro_batch(tiny_run_config(tmp_path), World(), 12)) == (12, 12)
    sharded = dataclasses.replace(config.train, parallel="fsdp")
    monkeypatch.setattr(World, "first", lambda world, act: act())
    there = (need.weights / 4 + need.memory / 2 + 0.6 * need.activations) / 0.75 / 2**30
    monkeypatch.setattr("compressive.training.preflight.memory_gib", lambda device: there)
    assert micro_batch(dataclasses.replace(config, train=sharded), World(0, 4), 6) == 6
    assert micro_batch(config, World(0, 4), 6) < 6


def test_recomputation_accumulation_and_bptt_count(tmp_path):
    plain = estimate(tiny_run_config(tmp_path), CPU, 4)
    less = estimate(tiny_run_config(tmp_path, recompute=True), CPU, 4)
    assert less.activations < plain.activations
    more = estimate(tiny_run_config(tmp_path, update_every=2, update_every_from=0), CPU, 4)
    assert more.weights == plain.weights * 5 // 4
    assert estimate(tiny_run_config(tmp_path, unroll=2), CPU, 4).activations == 2 * plain.activations


@pytest.mark.parametrize("name", preset_names("data"))
def test_every_preset_can_be_estimated_without_its_memory(name):
    config = RunConfig.from_preset(name)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="fp32"))
    assert estimate(config, CPU, config.train.batch).total > 2**24


def test_only_what_was_not_given_is_changed(tmp_path):
    corpus = Corpus.open(tiny_corpus(tmp_path))
    config = tiny_run_config(
        tmp_path, {"vocab_size": 999, "adaptive_cutoffs": (100, 500)}, precision="bf16", compile=True
    )
    changed, said = fit(config, (), corpus, CPU)
    assert (changed.model.vocab_size, changed.train.precision, changed.train.compile) == (256, "fp32", False)
    assert changed.model.adaptive_cutoffs == (100,)  # type: ignore[union-attr]
    assert len(said) == 2
    kept, said = fit(config, ("model.vocab_size", "train.precision", "train.compile"), corpus, CPU)
    assert (kept, said) == (config, [])
    on_gpu, _ = fit(config, (), corpus, CUDA)
    assert (on_gpu.train.precision, on_gpu.train.compile) == ("bf16", True)


def test_projected_bands_that_the_vocabulary_has_no_room_for_go(tmp_path):
    corpus = Corpus.open(tiny_corpus(tmp_path))
    config = tiny_run_config(tmp_path, {"vocab_size": 999, "adaptive_cutoffs": (500,), "first_band_projections": True})
    model = fit(config, (), corpus, CPU)[0].model
    assert isinstance(model, ModelConfig)
    assert (model.vocab_size, model.adaptive_cutoffs, model.first_band_projections) == (256, (), False)


def test_an_agent_s_protocol_is_fitted_too():
    train, said = fit_device(LearnConfig(precision="bf16", compile=True), ("train.compile",), torch.device("mps"))
    assert (train.precision, train.compile) == ("fp32", True)
    assert said == ["on mps, training is in fp32"]
