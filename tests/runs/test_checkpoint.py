"""Checkpoints: written atomically, checked when read; the last two and the best are kept."""

import json
import re
import subprocess
import textwrap

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_saver
from training_helpers import SHARD, latest
from warm_python import interpreter

from compressive.distributed import World
from compressive.runs import checkpoint
from compressive.runs.checkpoint import CheckpointError


def save(folder, step, value=None):
    tensors = {"w": torch.full((1000,), float(step if value is None else value)), "flag": torch.tensor(True)}
    return checkpoint.save(folder, step, {"model": tensors, "trainer": {"m": torch.zeros(3)}}, {"position": 7 * step})


def best(folder):
    found = checkpoint.best(folder)
    assert found is not None
    return found


def test_saved_and_read_back(tmp_path):
    save(tmp_path, 10)
    found = latest(tmp_path)
    assert found.step == 10
    assert found.state == {"position": 70}
    assert torch.equal(found.tensors("model")["w"], torch.full((1000,), 10.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010"]


def test_weights_are_apart_from_the_state_of_training(tmp_path):
    folder = save(tmp_path, 10)
    weights, rest = sorted(folder.glob("*.safetensors"))
    assert weights.name == SHARD
    assert set(load_file(weights)) == {"model.w", "model.flag"}
    assert set(load_file(rest)) == {"trainer.m"}


def test_without_checkpoints_there_is_none():
    from pathlib import Path

    assert checkpoint.latest(Path("nowhere")) is None
    assert checkpoint.best(Path("nowhere")) is None


@pytest.mark.parametrize("name", [SHARD, "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "alter", "remove"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, name, damage, capsys):
    save(tmp_path, 10)
    path = save(tmp_path, 20) / name
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif name == "manifest.json":
        path.write_text(path.read_text().replace('"position": 140', '"position": 141'))
    else:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert latest(tmp_path).step == 10
    warned = capsys.readouterr().err
    assert re.fullmatch(r"warning: .*step-00000020.*going back to the checkpoint before it\n", warned)
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "step-00000020")


def test_if_all_are_damaged_they_are_named_and_nothing_starts_anew(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    for step in (10, 20):
        save(folder, step)
        (folder / f"step-{step:08d}" / SHARD).write_bytes(b"")
    expected = r"all checkpoints .*step-00000020.*step-00000010.*start anew with another --out"
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.latest(folder)
    assert checkpoint.latest(tmp_path / "none") is None


def test_the_last_two_and_the_best_are_kept(tmp_path, capsys):
    for step in range(1, 7):
        save(tmp_path, step)
        if step == 2:
            checkpoint.mark_best(tmp_path, step, 0.5)
        checkpoint.prune(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.json", "step-00000002", "step-00000005", "step-00000006",
    ]  # fmt: skip
    assert best(tmp_path).step == 2
    (tmp_path / "step-00000002" / SHARD).unlink()
    assert best(tmp_path).step == 6
    assert "using the newest instead of the best" in capsys.readouterr().err


def test_after_going_back_past_damaged_checkpoints_new_ones_are_kept(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    for step in (20, 30):
        (tmp_path / f"step-{step:08d}" / SHARD).write_bytes(b"")
    assert latest(tmp_path).step == 10
    with checkpoint.Saver(tmp_path, World()) as saver:
        for step in (15, 18, 22):
            saver.save(step, {"model": {"w": torch.zeros(2)}}, {})
            saver.wait()
            assert latest(tmp_path).step == step
    kept = {int(path.name.removeprefix("step-")) for path in tmp_path.iterdir()}
    assert kept == {20, 22, 30}  # of 18 and 20, the last two up to 22, one is damaged


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_intact(tmp_path):
    """Save in a process that may not write files above 2 kB, so that the system refuses the write."""
    save(tmp_path, 1)
    code = f"""
        import resource, signal, sys, torch
        from pathlib import Path
        from compressive.runs import checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            checkpoint.save(Path({str(tmp_path)!r}), 2, {{"model": {{"w": torch.zeros(10000)}}}}, {{}})
        except Exception as error:
            print(type(error).__name__)
            sys.exit(0)
        sys.exit(1)
    """
    result = subprocess.run([*interpreter(), "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert result.stdout.strip()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert latest(tmp_path).step == 1


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, value=1)
    save(tmp_path, 1, value=2)
    assert latest(tmp_path).tensors("model")["w"][0] == 2


def test_a_killed_save_leaves_no_checkpoint(tmp_path):
    save(tmp_path, 1)
    partial = tmp_path / ".step-00000002.partial"
    partial.mkdir()
    (partial / SHARD).write_bytes(b"half")
    assert latest(tmp_path).step == 1
    save(tmp_path, 2)
    assert latest(tmp_path).step == 2
    assert not partial.exists()
    assert json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())["step"] == 2


def test_a_background_save_holds_the_values_at_its_start(tmp_path):
    """Tensors change while they are written; the best is marked, and old checkpoints are deleted."""
    tensor = torch.zeros(500_000)
    with checkpoint.Saver(tmp_path, World()) as saver:
        for step in range(1, 6):
            tensor.fill_(step)
            saver.save(step, {"model": {"w": tensor}}, {}, best=0.5 if step == 2 else None)
            tensor.fill_(-1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004", "step-00000005"]
    assert best(tmp_path).step == 2
    for step in (2, 4, 5):
        found = checkpoint.load(tmp_path / f"step-{step:08d}").tensors("model")["w"]
        assert torch.equal(found, torch.full((500_000,), float(step)))


def test_a_failed_save_is_raised_once_and_the_next_one_works(tmp_path, monkeypatch):
    saver, real = checkpoint.Saver(tmp_path, World()), state_dict_saver.save

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_dict_saver, "save", full)
    saver.save(1, {"model": {"w": torch.zeros(3)}}, {})
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    monkeypatch.setattr(state_dict_saver, "save", real)
    saver.save(2, {"model": {"w": torch.zeros(3)}}, {})
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".step-00000007.partial").mkdir(parents=True)
    checkpoint.Saver(tmp_path, World())
    assert list(tmp_path.iterdir()) == []
