"""Weights in files: types, shards, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressive.runs.weights import INDEX, SCALE, WEIGHTS, read_weights, weight_files, write_weights


@pytest.fixture
def weights():
    torch.manual_seed(0)
    shapes = {"embedding.weight": (300, 64), "conv.weight": (32, 32, 4), "norm.weight": (64,), "out.weight": (128, 400)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_one_file_without_a_limit(weights, tmp_path):
    write_weights(tmp_path, weights)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]
    read = read_weights(tmp_path)
    assert list(read) == sorted(weights)
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_fp32_is_fp32_whatever_the_weights_were(weights, tmp_path):
    write_weights(tmp_path, {name: weight.bfloat16() for name, weight in weights.items()}, "fp32")
    assert {weight.dtype for weight in read_weights(tmp_path).values()} == {torch.float32}


def test_every_row_of_a_matrix_in_8_bits_is_off_by_half_a_step_at_most(weights, tmp_path):
    weights["out.weight"][5] *= 1000
    weights["out.weight"][6] = 0
    write_weights(tmp_path, weights, "int8")
    held = load_file(tmp_path / WEIGHTS)
    matrices = [name for name, weight in weights.items() if weight.ndim > 1]
    assert held.keys() == weights.keys() | {name + SCALE for name in matrices}
    assert all(held[name].dtype == torch.int8 for name in matrices)
    read = read_weights(tmp_path)
    assert read.keys() == weights.keys()
    assert torch.equal(read["norm.weight"], weights["norm.weight"])
    for name in matrices:
        rows, got = weights[name].flatten(1), read[name].flatten(1)
        step = rows.abs().amax(1, keepdim=True) / 127
        assert read[name].dtype == torch.float32
        assert ((rows - got).abs() <= step / 2 + 1e-6 * rows.abs()).all()
    assert not read["out.weight"][6].any()


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
def test_shards_hold_what_one_file_holds(weights, tmp_path, stored):
    weights["large.weight"] = torch.randn(900, 600)  # 2.06 MiB
    for folder, size in (("whole", 0), ("sharded", 3 if stored == "fp32" else 1 if stored == "int8" else 2)):
        (tmp_path / folder).mkdir()
        layers = {f"{i}.{name}": weight.clone() for i in range(4) for name, weight in weights.items()}
        write_weights(tmp_path / folder, layers, stored, size)
    files = weight_files(tmp_path / "sharded")
    assert len(files) >= 4
    assert all(file.stat().st_size <= size * 2**20 for file in files)
    assert sorted(path.name for path in (tmp_path / "sharded").iterdir()) == [*(file.name for file in files), INDEX]
    whole, sharded = read_weights(tmp_path / "whole"), read_weights(tmp_path / "sharded")
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_a_tensor_that_fits_in_no_shard_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"shard_size=1: out\.weight alone has 1\.9 MiB"):
        write_weights(tmp_path, {"out.weight": torch.zeros(500, 1000)}, "fp32", 1)


@pytest.mark.parametrize("name", ["../other.safetensors", "/other.safetensors", "weights.bin", ""])
def test_an_index_names_safetensors_beside_it_only(tmp_path, name):
    save_file({"a": torch.zeros(2)}, tmp_path.parent / "other.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="expected the shards of the weights, safetensors files beside it"):
        read_weights(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(tmp_path, index):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json cannot be used"):
        read_weights(tmp_path)


def test_a_missing_shard_is_named(weights, tmp_path):
    write_weights(tmp_path, {f"{i}": torch.zeros(150, 1000) for i in range(4)}, "fp32", 1)
    weight_files(tmp_path)[1].unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-0000"):
        read_weights(tmp_path)
