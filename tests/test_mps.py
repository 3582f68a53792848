"""Apple's GPU (MPS), as far as it can be tested without one: what is refused, what must not be asked of it."""

import dataclasses
import warnings

import pytest
import torch
from rl_helpers import CPU, build, tiny_agent_run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compressive import bench, distributed
from compressive.architectures import build_model
from compressive.config import ModelConfig, TrainConfig
from compressive.distributed import World
from compressive.inference.generate import generate
from compressive.kernels import dispatch
from compressive.rl.evaluate import evaluate
from compressive.rl.learning import Learner
from compressive.rl.policies import AgentPolicy
from compressive.runtime import Stopwatch, autocast, pick_device
from compressive.training import loop
from compressive.training.preflight import fit_device
from compressive.training.step import Step, Windows

MPS = torch.device("mps")
MODEL = ModelConfig(
    n_layers=2, d_model=32, n_heads=2, d_ff=64, window=16, memory_size=16, compressed_size=8, compression_rate=4
)
TRAIN = TrainConfig(batch=2, warmup_steps=1)


def test_autocast_that_is_off_neither_fails_nor_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("mps", torch.bfloat16, enabled=False), torch.autocast("mps", enabled=False):
            assert not torch.is_autocast_enabled("mps")


def test_operations_run_in_their_reference_form():
    choices = dispatch.explain(MODEL, device="mps", precision="fp32", triton=True)
    kernels = {name for name, choice in choices.items() if choice.form == "kernel"}
    assert kernels == {"linear_nll"}  # plain torch, on any device
    assert choices["relative_attention"].why == "the device is mps, the kernel needs CUDA"
    assert choices["adam"].why == "the device is mps, the kernel needs CUDA"


def test_kernels_that_are_asked_for_are_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    case = {"device": "mps", "dtype": torch.float32, "head_width": 64}
    with dispatch.using("fused"), pytest.raises(ValueError, match="the device is mps, the kernel needs CUDA; use auto"):
        dispatch.choose("relative_attention", triton=True, **case)


def test_training_in_bf16_is_refused():
    options = dataclasses.replace(TRAIN, precision="bf16")
    with pytest.raises(ValueError, match=r"precision='bf16': expected fp32 on Apple's GPU \(mps\)"):
        Step(build_model(MODEL), options, World(device=MPS), 2)
    run = tiny_agent_run(train={"precision": "bf16"})
    with pytest.raises(ValueError, match=r"precision='bf16': expected fp32 on Apple's GPU \(mps\)"):
        Learner(build(run)[1], run.train, MPS)


def test_processes_of_torchrun_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(distributed, "pick_device", lambda name: MPS)
    with (
        pytest.raises(ValueError, match="device='mps': expected cpu or cuda under torchrun"),
        distributed.join("auto"),
    ):
        pass


def ignoring_found_inf(monkeypatch, optimiser):
    """Let a fused optimiser update in spite of `found_inf`, as MPS's does in versions of torch that we support."""
    step = optimiser.step

    def careless():
        optimiser.found_inf = torch.zeros(())
        step()

    monkeypatch.setattr(optimiser, "step", careless)


@pytest.mark.parametrize("good", [True, False])
def test_a_step_that_is_not_finite_changes_no_weight(good, monkeypatch):
    torch.manual_seed(0)
    model = build_model(MODEL)
    step_fn = Step(model, TRAIN, World(device=CPU), 2)
    ignoring_found_inf(monkeypatch, step_fn.optimiser)
    monkeypatch.setattr(step_fn, "device", MPS)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step_fn.update([torch.ones(()), torch.ones(())], torch.tensor(good))
    changed = [not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)]
    assert all(changed) if good else not any(changed)


@pytest.mark.parametrize("finite", [True, False])
def test_an_agent_s_update_that_is_not_finite_changes_no_weight(finite, monkeypatch):
    run = tiny_agent_run(train={"optimiser": "adam", "learning_rate": 1e-3})
    _, agent, actor = build(run)
    learner, rollout = Learner(agent, run.train, CPU), actor.rollout()
    ignoring_found_inf(monkeypatch, learner.optimiser)
    monkeypatch.setattr(learner, "device", MPS)
    if not finite:
        rollout.reward.fill_(torch.nan)
    before = {name: parameter.detach().clone() for name, parameter in agent.named_parameters()}
    assert bool(learner.update(rollout).finite) == finite
    changed = [not torch.equal(parameter, before[name]) for name, parameter in agent.named_parameters()]
    assert any(changed) == finite


def test_times_are_taken_when_the_device_has_finished(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    first, second = bench.mark(MPS), bench.mark(MPS)
    assert bench.between(first, second) >= 0
    assert waited == ["mps", "mps"]


class NoDoubles(TorchDispatchMode):
    """Fails at an operation that takes or returns float64, which MPS does not have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            doubles = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float64, torch.complex128)
            assert not doubles, f"{func} on float64"
        return result


def test_the_check_for_doubles_finds_one():
    with pytest.raises(AssertionError, match="on float64"), NoDoubles():
        torch.ones(2).double()


@pytest.mark.parametrize("compression", ["conv", "most_used"])
def test_training_and_sampling_text_use_no_doubles(compression):
    torch.manual_seed(0)
    model = build_model(dataclasses.replace(MODEL, compression=compression)).train()
    with NoDoubles():
        step_fn = Step(model, dataclasses.replace(TRAIN, update_every=2, update_every_from=0), World(device=CPU), 2)
        tokens = torch.randint(256, (1, 2, 16))
        starts = torch.zeros(1, 2, 16, dtype=torch.bool)
        starts[0, 1, 5] = True
        for i in range(4):
            record = step_fn(Windows(tokens, tokens, starts), i)
        assert record.finite
        assert len(list(generate(model, tokens[0, 0], 20, samples=2, top_p=0.9, top_k=50))) == 20


@pytest.mark.parametrize("optimiser", ["adam", "rmsprop"])
def test_an_agent_uses_no_doubles(optimiser):
    run = tiny_agent_run(train={"optimiser": optimiser})
    with NoDoubles():
        task, agent, actor = build(run)
        assert Learner(agent, run.train, CPU).update(actor.rollout()).finite
        assert len(evaluate(task, AgentPolicy(agent, task, 0, CPU), 6).returns) == 6


def test_observations_of_gymnasium_arrive_in_single_precision():
    task, _, _ = build(tiny_agent_run(task={"name": "CartPole-v1", "envs": 2}, train={"batch": 2}))
    with NoDoubles():
        assert task.reset().dtype == torch.float32
    transition = task.step(torch.zeros(2, dtype=torch.long))  # rewards are cast before they are moved
    assert (transition.observation.dtype, transition.reward.dtype) == (torch.float32, torch.float32)


def test_clocks_and_bf16_know_the_device(monkeypatch):
    waited: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    Stopwatch(MPS).lap()
    assert waited == ["mps"]
    with pytest.raises(ValueError, match="precision='bf16': expected fp32"):
        autocast(MPS, "bf16")
    assert fit_device(dataclasses.replace(TRAIN, precision="bf16"), (), MPS)[1] == ["on mps, training is in fp32"]


def test_random_numbers_go_on_where_they_were(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.ones(3))
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: told.append("mps"))
    state = loop._rng_state(World(device=MPS))
    assert set(state) == {"cpu.0", "mps.0"}
    loop._set_rng_state(state)
    assert told == ["mps"]


@pytest.mark.parametrize(
    ("there", "works", "expected"), [(True, True, "mps"), (True, False, "cpu"), (False, True, "cpu")]
)
def test_auto_takes_it_where_it_works(monkeypatch, there, works, expected):
    real = torch.ones

    def ones(*size: int, device: str) -> torch.Tensor:
        if not works:
            raise RuntimeError("no Metal device")
        return real(*size)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)
    monkeypatch.setattr(torch, "ones", ones)
    assert pick_device("auto").type == expected
