"""Benchmarks: peers side by side, with stand-ins for the other packages; growth of cost; kernels; figures."""

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import ROOT, benchmark
from torch import nn
from training_helpers import tiny_corpus
from warm_python import interpreter

from compressive import bench
from compressive.config import ModelConfig, RunConfig, TrainConfig

CPU = torch.device("cpu")
MODEL = ModelConfig(
    n_layers=2, d_model=32, n_heads=2, d_ff=48, window=16, memory_size=16, compressed_size=8, compression_rate=4
)
CONFIG = RunConfig(model=MODEL, train=TrainConfig(batch=2))


@pytest.fixture(scope="module")
def peers():
    return benchmark("peers")


@pytest.fixture(scope="module")
def growth():
    return benchmark("growth")


@pytest.fixture
def own_processes_start_warm(monkeypatch):
    """Rows are measured in processes of their own, which have torch already; test_bench.py starts new ones."""

    def run(words: list[str], **options: Any) -> Any:
        assert words[0] == sys.executable
        return subprocess.run([*interpreter(), *words[1:]], **options)

    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=run))


class Net(nn.Module):
    """A stand-in with the signature and the outputs of compressive-transformer-pytorch."""

    def __init__(self, num_tokens, dim, seq_len, depth, heads, mem_len, cmem_len, cmem_ratio, **extras):
        super().__init__()
        self.extras, self.shapes = extras, []
        self.embedding = nn.Embedding(num_tokens, num_tokens)
        self.to_kv = nn.Linear(dim, dim)
        mlp = SimpleNamespace(fn=SimpleNamespace(fn=nn.Module()))
        self.ff_layers = [mlp] * depth

    def forward(self, x, memories):
        self.shapes.append([tuple(memory.shape) for memory in memories])
        self.to_kv.weight.detach_()
        return self.embedding(x), tuple(memory + 1 for memory in memories), torch.ones(1)


def test_another_package_is_asked_for_the_same_sizes(peers, monkeypatch):
    made: list[Any] = []
    sampled: list[Any] = []

    class Wrapper:
        def __init__(self, net):
            self.net = net

        def generate(self, start, length):
            sampled.append((tuple(start.shape), length))
            *windows, last = start.split(16, dim=1)
            for window in [*windows, *[last] * length]:
                self.net(window, memories=())

    def make(**sizes):
        made.append(Net(**sizes))
        return made[-1]

    package: Any = ModuleType("compressive_transformer_pytorch")
    package.CompressiveTransformer = make
    package.AutoregressiveWrapper = Wrapper
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for lean in (False, True):
        subject = peers.ctp(CONFIG, CPU, lean=lean)
        loss = subject.forward()
        subject.forward()
        loss.backward()
        net = made[-1]
        assert net.shapes == [[(2, 2, 16, 32), (2, 2, 8, 32)]] * 2
        assert net.ff_layers[0].fn.fn.w1.out_features == 48
        assert net.to_kv.weight.requires_grad == lean  # frozen by its first compression, as shipped
        assert bool(net.extras) == lean
        subject.sample(3, 5, lambda: sampled.append("token"))
        assert sampled == [((3, 4 * 16), 5), *["token"] * 5]  # none for the windows of the prompt
        sampled.clear()


def test_the_plain_model_reads_memory_and_no_future(peers):
    torch.manual_seed(0)
    model = peers.Plain(MODEL)
    x = torch.randint(256, (2, 16))
    memory = torch.randn(2, 2, 24, 32)
    logits, after = model(x, memory)
    assert after.shape == memory.shape
    torch.testing.assert_close(after[0][:, :8], memory[0][:, 16:])
    changed = torch.cat([x[:, :-1], (x[:, -1:] + 1) % 256], dim=1)
    torch.testing.assert_close(model(changed, memory)[0][:, :-1], logits[:, :-1])
    assert not torch.allclose(model(x, memory + 1)[0], logits)


def test_a_whole_step_of_the_plain_model_is_that_of_its_parts(peers):
    found = []
    for whole in (True, False):
        torch.manual_seed(0)
        subject = peers.plain(CONFIG, CPU)
        parameters, losses = subject.groups[0], []
        optimiser = torch.optim.Adam(parameters, lr=1e-5, fused=True)
        for _ in range(3):
            if whole:
                subject.step()
                continue
            losses.append(subject.forward())
            losses[-1].backward()
            nn.utils.clip_grad_norm_(parameters, 0.1)
            optimiser.step()
            optimiser.zero_grad()
        found.append([parameter.detach() for parameter in parameters])
    torch.testing.assert_close(*found)
    assert losses[0] > losses[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
def test_flash_attention_sees_the_window_up_to_itself_and_all_memory(peers):
    q, k, v = (torch.randn(2, 3, n, 64, device="cuda") for n in (32, 80, 80))
    exact = peers.attend(q, k, v)
    torch.testing.assert_close(peers.attend(q.bfloat16(), k.bfloat16(), v.bfloat16()).float(), exact, rtol=0, atol=3e-2)


def test_rounds_become_medians_and_an_error_stays_one(peers):
    assert peers.merge([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0}
    assert peers.merge([{"a": 1.0}, {"error": "E: no"}]) == {"error": "E: no"}
    assert peers.merge([{"error": "E: no"}, {"a": 1.0}]) == {"error": "E: no"}


def test_our_best_row_is_set_against_the_best_peer(peers):
    key = "tokens_per_second"
    rows = [
        {"name": "ours", key: 30.0},
        {"name": "ours-compiled", key: 60.0},
        {"name": "ctp", key: 20.0},
        {"name": "labml", "error": "E: not there"},
        {"name": "plain", key: 90.0},
    ]
    assert peers.against_peers(rows) == {key: 3.0}


@pytest.mark.slow
def test_the_script_prints_rows_and_errors_writes_and_plots(
    peers, own_processes_start_warm, tmp_path, capsys, monkeypatch
):
    """One row is measured; the other package is not installed, which gives an error row."""
    pytest.importorskip("matplotlib")
    broken = tmp_path / "compressive_transformer_pytorch.py"
    broken.write_text("raise ImportError('not installed')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        sys, "argv", ["peers.py", "--size", "tiny", "--rows", "plain,ctp", "--steps", "1",
                      "--results", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")],
    )  # fmt: skip
    peers.main()
    shown = capsys.readouterr().out
    assert "ctp: ImportError: not installed" in shown
    saved = json.loads((tmp_path / "rows.json").read_text())
    plain, ctp = saved["rows"]
    assert plain["tokens_per_second"] > 0
    assert ctp == {"name": "ctp", "batch": 8, "error": "ImportError: not installed"}
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("script", "name"),
    [("peers", "peers-base"), ("peers", "peers-paper"), ("peers", "peers-cpu"), ("growth", "growth")],
)
def test_figures_are_plotted_from_results_files_without_measuring(script, name, tmp_path, monkeypatch):
    """The newest file of each; growth's was written when reference attention had another name."""
    pytest.importorskip("matplotlib")
    newest = sorted((ROOT / "benchmarks" / "results" / name).glob("*.json"))[-1]
    module = benchmark(script)
    monkeypatch.setattr(module.bench, "measure", None)
    monkeypatch.setattr(sys, "argv", [script, "--plot-only", str(newest), "--plot", str(tmp_path / "a.png")])
    module.main()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_every_row_has_a_plain_label(peers):
    assert set(peers.LABELS) == set(peers.ROWS)


def test_an_unknown_row_is_refused(peers, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peers.py", "--rows", "ours,mine"])
    with pytest.raises(SystemExit):
        peers.main()
    assert "no row mine; choose from ours," in capsys.readouterr().err


def test_growth_fits_the_paper_s_formula(growth):
    """Synthetic points: the line is recovered, points without compression or with errors are left out of the fit."""

    def run(point):
        if point.window == 256:
            return {"error": "OutOfMemoryError: too long"}
        time = 7.0 + 0.5 * (64 + 64 + point.compressed) if point.compressed else 1.0
        return {"step_ms": time, "us_per_token": time, "peak_gib": 2.0 if point.compressed == 128 else 1.0}

    size = growth.SIZES["tiny"]
    sweeps = growth.sweeps_of(64, (0, 64, 128, 256), (64, 256))
    rows = growth.measured(sweeps, size, 1, run)
    assert [row["batch"] for row in rows] == [8, 8, 8, 8, 8, 2]
    assert [row["memory"] for row in rows] == [64] * 5 + [256]
    assert rows[1] == rows[4] | {"sweep": "compressed size"}  # a point of both sweeps is measured once
    line = growth.fit(rows, "compressed size", "reference", "us_per_token")
    assert (line["constant"], line["per_1000_slots"]) == (pytest.approx(7), pytest.approx(500))
    assert line["max_relative_deviation"] < 1e-9
    assert growth.fit(rows, "compressed size", "reference", "peak_gib")["max_relative_deviation"] > 0.3
    alone = growth.fit(rows, "window", "reference", "us_per_token")
    assert growth.describe(alone).endswith("1 points measured, a line needs two")
    assert "window 256, compressed 256: OutOfMemoryError: too long" in growth.caption(rows)


def test_growth_keeps_the_fastest_round_and_any_error(growth):
    slow, fast, error = {"step_ms": 2.0}, {"step_ms": 1.0}, {"error": "E: no"}
    assert growth.fastest([slow, fast, slow]) == fast
    assert growth.fastest([fast, error]) == error


@pytest.mark.slow
def test_growth_goes_on_after_an_error_in_its_own_process(growth):
    size = growth.SIZES["tiny"]
    failed = growth.measured_here(growth.Point("reference", 64, -1), size, 1)
    assert failed["error"].startswith("ValueError: compressed")
    assert growth.measured_here(growth.Point("reference", 64, 32), size, 1)["step_ms"] > 0


@pytest.mark.slow
def test_growth_measures_writes_and_plots(growth, own_processes_start_warm, tmp_path, capsys, monkeypatch):
    """Three points, one of them impossible, which gives an error row."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        sys, "argv", ["growth.py", "--size", "tiny", "--compressed", "32,1024,-1", "--windows", "", "--steps", "1",
                      "--results", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")],
    )  # fmt: skip
    growth.main()
    assert "reference, window 64, compressed -1: ValueError: " in capsys.readouterr().out
    saved = json.loads((tmp_path / "rows.json").read_text())
    small, large, broken = saved["rows"]
    assert small["us_per_token"] == pytest.approx(1000 * small["step_ms"] / 512)
    assert small["peak_gib"] < large["peak_gib"]
    assert "compressed_size" in broken["error"]
    assert [line["figure"] for line in saved["fits"] if "constant" in line] == ["us_per_token", "peak_gib"]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["attention", "reconstruction"])
def test_kernels_are_compared_with_torch_and_every_form_is_timed(tmp_path, monkeypatch, script):
    """At tiny size, interpreted: the script runs, and its errors are small."""
    pytest.importorskip("triton", reason="triton is not installed")
    words = [script, "--size", "tiny", "--repeats", "1", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", words)
    module = benchmark(script)
    B, _, *sizes = module.SIZES["tiny"]
    monkeypatch.setitem(module.SIZES, "tiny", (B, 1, *sizes))  # one head: tests of the kernels have more
    module.main()
    found = json.loads((tmp_path / "found.json").read_text())
    ways = {"attention": ("fused", "reference", "flash"), "reconstruction": ("torch", "fused")}[script]
    assert all(found[way][part] > 0 for way in ways for part in ("forward_ms", "forward_backward_ms"))
    errors = found["fused_errors"] if script == "attention" else found["errors"]
    assert max(errors.values()) < 1e-5


def test_kernels_of_a_token_are_counted_without_its_prompt():
    kernels = benchmark("kernels")
    whole = {"step": 6.5, "prompt": 2.0, "noise": 0.9}
    assert kernels.per_token(whole, {"step": 0.1, "prompt": 2.0, "noise": 1.0}) == {
        "step": 0.1, "prompt": 0.0, "noise": 0.0,
    }  # fmt: skip


def test_variants_of_the_decoding_kernels_take_turns_and_one_that_fails_keeps_the_others(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton", reason="triton is not installed")
    from compressive.kernels import relative_attention_step

    kernels, order, usual = benchmark("kernels"), [], relative_attention_step.LINEAR_BLOCK_K

    def speed(sample, batch, length, device, settling):
        order.append((batch, relative_attention_step.LINEAR_BLOCK_K, relative_attention_step.SPLIT_WARPS))
        if relative_attention_step.SPLIT_WARPS == 2:
            raise RuntimeError("too many registers")
        return float(len(order))

    monkeypatch.setattr(kernels, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(kernels, "ours", lambda *_, **__: None)
    monkeypatch.setattr(kernels, "sampler", lambda *_: None)
    monkeypatch.setattr(kernels, "token_kernels", lambda *_: {"a": 1.0, "b": 2.0})
    monkeypatch.setattr(kernels.bench, "measure_generation", speed)
    words = ["--variants", "--size", "tiny", "--rounds", "3", "--results", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["kernels.py", *words])
    kernels.main()
    assert order[:4] == [(1, usual, 1), (1, 256, 1), (1, usual, 2), (1, usual, 1)]
    assert (len(order), relative_attention_step.LINEAR_BLOCK_K) == (18, usual)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["batch"], row["variant"]) for row in rows] == [(b, name) for b in (1, 32) for name in kernels.VARIANTS]
    assert [row.get("tokens_per_second", row.get("error")) for row in rows[:3]] == [
        4.0, 5.0, "RuntimeError: too many registers",
    ]  # fmt: skip
    assert rows[0]["kernels_ms"] == 3.0
    assert "too many registers" in capsys.readouterr().out


def test_a_register_that_a_product_still_reads_must_not_be_written():
    pytest.importorskip("triton", reason="triton is not installed")
    machine_code = benchmark("machine_code")

    def loop(*lines):
        return ".L_x_0:\n" + "\n".join(f"        /*00{i}0*/                   {line} ;" for i, line in enumerate(lines))

    product = "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8].tnspB, R24, gsb0"
    again, wait = "@P0 BRA `(.L_x_0)", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    for load in ("LDS.128 R56, [R2+UR4]", "SEL R59, R1, RZ, !P0", "LDSM.16.M88.4 R54, [R2]"):
        assert machine_code.hazards(loop(load, product, again, wait, "EXIT")) == 1
        assert machine_code.hazards(loop(load, product, wait, again, "EXIT")) == 0
    for other in ("LDS.128 R60, [R56+UR4]", "STS.128 [R2], R56", "ISETP.NE.AND P0, PT, R56, RZ, PT"):
        assert machine_code.hazards(loop(other, product, again, wait, "EXIT")) == 0
    late = "WARPGROUP.DEPBAR.LE gsb0, 0x1"  # one group may be left, the product's own
    assert machine_code.hazards(loop("SEL R56, R1, RZ, !P0", product, late, again, "EXIT")) == 1
    assert machine_code.hazards(loop("SEL R56, R1, RZ, !P0", product, product, late, again, "EXIT")) == 1
    assert machine_code.hazards(loop(product.replace("R56", "gdesc[UR4]"), "SEL R56, R1, RZ, !P0", again)) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_cannot_be_timed_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--size", "tiny"])
    with pytest.raises(SystemExit):
        benchmark("kernels").main()
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_the_wait_policy_is_measured_beside_other_work(tmp_path, monkeypatch, capsys):
    tiny_corpus(tmp_path / "data")
    wait_policy = benchmark("wait_policy")
    assert "GOMP_SPINCOUNT=10000" in wait_policy.SETTINGS  # what the command sets
    monkeypatch.setattr(wait_policy, "PYTHON", interpreter())
    monkeypatch.setattr(wait_policy, "SETTINGS", {"one thread": {"OMP_NUM_THREADS": "1"}})
    monkeypatch.setattr(wait_policy, "LOADS", (0, 1))
    words = ["--corpus", "tiny", "--data-dir", tmp_path / "data", "--steps", 2, "--rounds", 1]
    monkeypatch.setattr(sys, "argv", ["wait_policy.py", *map(str, [*words, "--results", tmp_path / "r.json"])])
    wait_policy.main()
    assert "1 busy  one thread" in capsys.readouterr().out
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["busy_processes"] for row in rows] == [0, 1]
    assert all(row["tokens_per_second"] > 0 for row in rows)


@pytest.mark.parametrize("script", ["words", "rooms"])
def test_rows_that_fail_hold_their_error_and_all_are_written(script, tmp_path, monkeypatch, capsys):
    module = benchmark(script)

    def fail(*_):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(module, "measure", fail)
    words = {"words": ["--preset", "wikitext2"], "rooms": ["--preset", "rooms-tiny", "--envs", "4", "8"]}[script]
    monkeypatch.setattr(sys, "argv", [script, *words, "--results", str(tmp_path / "rows.json")])
    module.main()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["error"] for row in rows] == ["RuntimeError: CUDA error"] * len(rows)
    assert len(rows) >= 2
    assert "CUDA error" in capsys.readouterr().out


def test_every_form_of_a_band_has_the_same_loss():
    words = benchmark("words")
    model = ModelConfig(**vars(MODEL) | {"vocab_size": 200, "adaptive_cutoffs": (50, 100)})
    rows = [words.measure(name, RunConfig(model=model, train=CONFIG.train), CPU, 1) for name in ("looked-up", "masked")]
    assert rows[0]["first_loss"] == pytest.approx(rows[1]["first_loss"])
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_startup_reads_whole_records_of_training_only(tmp_path):
    startup = benchmark("startup")
    assert startup.steps_done(tmp_path / "metrics.jsonl") == []
    lines = [{"kind": "train", "step": 1}, {"kind": "eval", "step": 1}, {"kind": "train", "step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')
    assert startup.steps_done(tmp_path / "metrics.jsonl") == [1, 2]


def test_startup_shows_why_a_run_ended(tmp_path):
    startup = benchmark("startup")
    with pytest.raises(SystemExit, match=r"ended without 10 steps:\n(.|\n)*preset='nothing': expected a preset"):
        startup.start(tmp_path, "a", ["nothing"], tmp_path / "caches", 60)
