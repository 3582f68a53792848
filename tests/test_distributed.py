"""Many processes as one: the same losses however many there are, through restarts, signals and faults."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
from helpers import TESTS
from torch._C._distributed_c10d import TCPStore
from training_helpers import flags, latest, tiny_corpus, tiny_run_config
from warm_python import interpreter

from compressive.distributed import World
from compressive.training import loop

pytestmark = pytest.mark.slow

WORKER = TESTS / "parallel_worker.py"
LONG = 40
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulation": ({}, {"update_every": 3, "update_every_from": 4}),
    "bptt": ({"compression_loss": "none"}, {"unroll": 2}),
    "most used": ({"compression": "most_used"}, {}),
    "resets": ({}, {"reset_probability": 0.2}),
    "micro-batches": ({}, {"micro_batch": 2}),
    "muon": ({}, {"optimiser": "muon"}),
    "averages": ({}, {"weight_average": 0.9}),
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    tiny_corpus(folder)
    return folder


def cases_of(kind):
    """Muon needs whole matrices, so it is not for shards."""
    return [name for name in CASES if (kind, name) != ("fsdp", "muon")]


def config_of(data_dir, case="plain", **train):
    model, values = CASES[case]
    return tiny_run_config(data_dir, model, **{"batch": 12, "log_every": 1, "steps": 20} | values | train)


def run(processes, jobs, folder, code=0):
    """Run jobs in so many processes, as torchrun would, to the end; give what each process wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"jobs-{random.getrandbits(64):x}.json"
    file.write_text(json.dumps(jobs))
    # The store is here, as torchrun keeps it: a port that is looked for and given to others might be taken meanwhile.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*interpreter(), str(WORKER), str(file)], env=os.environ | common | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240) for process in started]
    for process, (_, error) in zip(started, outputs, strict=True):
        assert process.returncode == code, error
    return outputs


def job(folder, config, **more):
    return {"folder": str(folder), "config": dataclasses.asdict(config), **more}


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"]) for line in lines]


def assert_same(got, want, tolerance):
    got, want = losses(got), losses(want)
    assert [line[:2] for line in got] == [line[:2] for line in want]
    assert len(want) >= 20
    for (_, step, a), (_, _, b) in zip(got, want, strict=True):
        assert abs(a - b) < tolerance, step


@pytest.fixture(scope="module")
def alone(data_dir, tmp_path_factory):
    """Every case in one process, uninterrupted."""
    folder = tmp_path_factory.mktemp("alone")
    jobs = [job(folder / name, config_of(data_dir, name)) for name in CASES]
    jobs.append(job(folder / "float32", config_of(data_dir), dtype="float32"))
    jobs.append(job(folder / "long", config_of(data_dir, steps=LONG, eval_every=0), dtype="float32"))
    run(1, jobs, folder)
    return folder


def test_one_process_ddp_and_fsdp_give_the_same_losses(data_dir, alone, tmp_path):
    jobs = []
    for kind in ("ddp", "fsdp"):
        for name in cases_of(kind):
            config = config_of(data_dir, name, parallel=kind, recompute=kind == "fsdp" and name != "bptt")
            jobs.append(job(tmp_path / kind / name, config))
        jobs.append(job(tmp_path / kind / "float32", config_of(data_dir, parallel=kind), dtype="float32"))
    run(2, jobs, tmp_path)
    for kind in ("ddp", "fsdp"):
        for name in cases_of(kind):
            assert_same(tmp_path / kind / name, alone / name, 1e-9)
        assert_same(tmp_path / kind / "float32", alone / "float32", 1e-4)


def test_a_run_goes_on_with_another_number_of_processes(data_dir, alone, tmp_path):
    """Saved by two, in mid-accumulation; continued by one, three and four, sharded or not."""
    names = {"ddp": "accumulation", "fsdp": "most used"}
    halves = [
        job(tmp_path / f"{kind}-{then}-{size}", config_of(data_dir, names[kind], parallel=kind, steps=10))
        for kind, then, size in [("ddp", "ddp", 1), ("fsdp", "ddp", 3), ("ddp", "fsdp", 4), ("fsdp", "fsdp", 4)]
    ]
    run(2, halves, tmp_path)
    for size in (1, 3, 4):
        rest = []
        for folder in sorted(tmp_path.glob(f"*-*-{size}")):
            first, then, _ = folder.name.split("-")
            assert latest(folder / "checkpoints").state["processes"] == 2
            rest.append(job(folder, config_of(data_dir, names[first], parallel=then)))
        run(size, rest, tmp_path)
        for folder in tmp_path.glob(f"*-*-{size}"):
            assert_same(folder, alone / names[folder.name.split("-")[0]], 1e-9)


def test_streams_that_cannot_be_shared_are_refused():
    assert [World(rank, 4).streams(12) for rank in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 3)]
    with pytest.raises(
        ValueError, match=r"batch=12: 5 processes cannot share .* one of 1, 2, 3, 4, 6, 12 .* multiple of 5"
    ):
        World(0, 5).streams(12)


def test_fsdp_needs_torchrun(data_dir, tmp_path):
    from compressive.runs.run import Run

    with pytest.raises(ValueError, match="parallel='fsdp': expected torchrun"):
        loop.train(Run.create(tmp_path / "run", config_of(data_dir, parallel="fsdp")))


def test_nan_in_one_process_is_skipped_by_all(data_dir, tmp_path):
    config = config_of(data_dir, steps=8, eval_every=0, checkpoint_every=100)
    outputs = run(2, [job(tmp_path / "run", config, fault="nan on one")], tmp_path)
    assert "update and memory skipped" in outputs[0][1]
    assert "skipped" not in outputs[1][1]  # the first speaks for all
    assert [step for _, step, loss in losses(tmp_path / "run") if loss is None] == [5]
    found = latest(tmp_path / "run" / "checkpoints")
    assert found.step == 8
    for part in ("model", "optimiser", "memory"):
        for name, tensor in found.tensors(part).items():
            assert tensor.isfinite().all(), name
    counts = {float(x) for name, x in found.tensors("optimiser").items() if name.endswith(".step")}
    assert counts == {7.0}  # eight steps, one of them skipped


@pytest.mark.parametrize("to", ["one", "all"])
def test_a_signal_stops_all_processes_at_one_checkpoint(to, data_dir, alone, tmp_path):
    config = config_of(data_dir, checkpoint_every=100)
    run(2, [job(tmp_path / "run", config, fault=f"signal to {to}")], tmp_path)
    assert [(tmp_path / "run" / f"code-{rank}").read_text() for rank in (0, 1)] == [str(loop.INTERRUPTED)] * 2
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000009"]
    run(2, [job(tmp_path / "run", config)], tmp_path)
    assert_same(tmp_path / "run", alone / "plain", 1e-9)


def test_if_one_process_cannot_load_all_say_so(data_dir, tmp_path):
    config = config_of(data_dir, steps=10)
    run(2, [job(tmp_path / "run", config)], tmp_path)
    more = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=12))
    outputs = run(2, [job(tmp_path / "run", more, fault="one cannot load")], tmp_path, code=2)
    for _, error in outputs:
        assert "cannot be read (process 1: disk on fire)" in error


def torchrun(*words, program=("-m", "compressive")):
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         *program, *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_killed_worker_is_restarted_and_the_run_ends_the_same(data_dir, alone, tmp_path):
    """The real commands: torchrun, two workers, one of them killed after the checkpoint of step 10."""
    config = config_of(data_dir, steps=LONG, checkpoint_every=10, eval_every=0)
    killed = ("--max-restarts", "1", str(TESTS / "killed_worker.py"), "10", "1")
    agent = torchrun("train", "enwik8", *flags(config), "--out", tmp_path / "run", program=killed)
    out, error = agent.communicate(timeout=240)
    assert agent.returncode == 0, error
    assert "from step 10" in out
    assert f"done: {LONG} steps" in out
    assert len((tmp_path / "run" / "environment.jsonl").read_text().splitlines()) == 2
    assert_same(tmp_path / "run", alone / "long", 1e-4)


def test_evaluation_uses_all_processes(data_dir, alone):
    """The same streams in one process and in two give the same nats; dynamic evaluation is for one."""
    words = ("evaluate", alone / "float32", "--split", "test", "--streams", "5", "--json")
    one = subprocess.run(
        [*interpreter(), "-m", "compressive", *map(str, words)], capture_output=True, text=True, check=True
    )
    warm = ("--no-python", *interpreter(), "-m", "compressive")
    two = torchrun(*words, program=warm)
    out, error = two.communicate(timeout=240)
    assert two.returncode == 0, error
    first, second = json.loads(one.stdout), json.loads(out)  # one report, by the first process
    assert (first["processes"], second["processes"]) == (1, 2)
    assert first["streams"] == second["streams"] == 5
    assert first["tokens"] == second["tokens"]
    assert second["nats"] == pytest.approx(first["nats"], rel=1e-6)
    refused = torchrun("evaluate", alone / "float32", "--dynamic", program=warm)
    assert "expected one process, not 2" in refused.communicate(timeout=240)[1]


def killed_saves(folder, times, seed):
    """Kill a process at random moments while it saves over and over; each time a whole checkpoint must be there."""
    code = f"""
        import os, random, signal, sys, time, torch, warnings
        from pathlib import Path
        from compressive.distributed import World
        from compressive.runs import checkpoint

        folder, draw, last = Path({str(folder)!r}), random.Random({seed}), 0
        tensors = {{str(i): torch.zeros(100_000) for i in range(10)}}
        for attempt in range({times} + 1):
            began, child = time.monotonic(), os.fork()
            if child == 0:
                saver, step = checkpoint.Saver(folder, World()), last
                while attempt or step == 0:  # the first only saves once, to see how long that takes
                    step += 1
                    for tensor in tensors.values():
                        tensor.fill_(step)
                    saver.save(step, {{"model": tensors}}, {{"step": step}}, best=1 / step)
                saver.wait()
                os._exit(0)
            if attempt:
                time.sleep(draw.uniform(0.2, 4) * once)
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            once = time.monotonic() - began if not attempt else once
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a damaged one in its final place would be warned of
                found = checkpoint.latest(folder)
            assert found.step >= last, (found.step, last)
            assert all((x == found.step).all() for x in found.tensors("model").values())
            last = found.step
        print("last", last, sorted(path.name for path in folder.iterdir()))
    """
    import textwrap

    result = subprocess.run(
        [*interpreter(), "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "last 1 " not in result.stdout  # some saves were whole before the kill


def test_killed_while_saving(tmp_path):
    killed_saves(tmp_path, 10, seed=0)


@pytest.mark.soak
def test_killed_while_saving_a_hundred_times(tmp_path):
    killed_saves(tmp_path, 100, seed=1)
