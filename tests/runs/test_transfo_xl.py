"""TransformerXL in Hugging Face's layout becomes a release with equal losses; the rest is refused by name.

`Reference` is the published definition in plain loops over windows, written for this test: adaptive input, relative
attention with clamped distances, adaptive softmax with clusters, memory.
"""

import json
import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from training_helpers import command

import compressive
from compressive.data.corpus import Corpus, write_corpus
from compressive.data.tokenizer import WordTokenizer, load_tokenizer
from compressive.evaluation.score import score
from compressive.inference.generate import prime
from compressive.runs import transfo_xl
from compressive.runs.run import Run

CONFIG: dict[str, Any] = {
    "model_type": "transfo-xl", "vocab_size": 40, "cutoffs": [10, 18, 30], "d_model": 16, "d_embed": 16, "n_head": 2,
    "d_head": 8, "d_inner": 24, "div_val": 2, "n_layer": 3, "mem_len": 11, "clamp_len": 13, "same_length": False,
    "attn_type": 0, "untie_r": True, "pre_lnorm": False, "dropout": 0.1, "dropatt": 0.0, "tgt_len": 6,
    "tie_projs": [False, True, True, True], "sample_softmax": -1,
}  # fmt: skip
WORDS = ["<eos>", "the", "<unk>", *(f"word{i}" for i in range(37))]


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights in the published layout, tied tensors included."""
    generator = torch.Generator().manual_seed(seed)
    D, HK, V, div = config["d_model"], config["n_head"] * config["d_head"], config["vocab_size"], config["div_val"]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.5

    found = {}
    edges = [0, *config["cutoffs"], V]
    for i in range(len(edges) - 1):
        width, size = D // div**i, edges[i + 1] - edges[i]
        found[f"transformer.word_emb.emb_layers.{i}.weight"] = random(size, width)
        found[f"crit.out_layers.{i}.weight"] = found[f"transformer.word_emb.emb_layers.{i}.weight"].clone()
        found[f"crit.out_layers.{i}.bias"] = random(size)
        if config["cutoffs"]:
            found[f"transformer.word_emb.emb_projs.{i}"] = random(D, width)
            tied = found[f"transformer.word_emb.emb_projs.{i}"]
            found[f"crit.out_projs.{i}"] = tied.clone() if i else random(D, width)
    if config["cutoffs"]:
        found["crit.cluster_weight"] = random(len(edges) - 2, D)
        found["crit.cluster_bias"] = random(len(edges) - 2)
    found["transformer.pos_emb.inv_freq"] = random(D // 2)
    if not config["untie_r"]:
        for bias in ("r_w_bias", "r_r_bias"):
            found[f"transformer.{bias}"] = random(config["n_head"], config["d_head"])
    for i in range(config["n_layer"]):
        attention, mlp = f"transformer.layers.{i}.dec_attn", f"transformer.layers.{i}.pos_ff"
        found[f"{attention}.qkv_net.weight"] = random(3 * HK, D)
        found[f"{attention}.o_net.weight"] = random(D, HK)
        found[f"{attention}.r_net.weight"] = random(HK, D)
        for bias in ("r_w_bias", "r_r_bias"):
            shared = None if config["untie_r"] else found[f"transformer.{bias}"].clone()
            found[f"{attention}.{bias}"] = random(config["n_head"], config["d_head"]) if shared is None else shared
        for norm in (f"{attention}.layer_norm", f"{mlp}.layer_norm"):
            found[f"{norm}.weight"], found[f"{norm}.bias"] = 1 + random(D), random(D)
        for number, shape in ((0, (config["d_inner"], D)), (3, (D, config["d_inner"]))):
            found[f"{mlp}.CoreNet.{number}.weight"] = random(*shape)
            found[f"{mlp}.CoreNet.{number}.bias"] = random(shape[0])
    return found


class Reference:
    """TransformerXL as published, for one text; in float64."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, {name: x.double() for name, x in weights.items()}
        self.edges = [0, *config["cutoffs"], config["vocab_size"]]
        D = config["d_model"]
        self.memories = [torch.zeros(config["mem_len"], D, dtype=torch.double) for _ in range(config["n_layer"])]

    def read(self, tokens: list[int]) -> Tensor:
        """Log-probabilities after each token of a window, (T, V); the memories move on."""
        h = torch.stack([self.embed(token) for token in tokens])
        for i, memory in enumerate(self.memories):
            slots = torch.cat([memory, h])
            self.memories[i] = slots[len(slots) - len(memory) :]
            h = self.layer(f"transformer.layers.{i}", h, slots)
        return torch.stack([self.log_p(row) for row in h])

    def embed(self, token: int) -> Tensor:
        band = sum(token >= edge for edge in self.edges[1:-1])
        row = self.weights[f"transformer.word_emb.emb_layers.{band}.weight"][token - self.edges[band]]
        if self.config["cutoffs"]:
            row = self.weights[f"transformer.word_emb.emb_projs.{band}"] @ row
        return row * self.config["d_model"] ** 0.5

    def layer(self, name: str, h: Tensor, slots: Tensor) -> Tensor:
        H, K, D = self.config["n_head"], self.config["d_head"], self.config["d_model"]
        w = {key.removeprefix(f"{name}."): x for key, x in self.weights.items() if key.startswith(f"{name}.")}
        q, k, v = (slots @ w["dec_attn.qkv_net.weight"].T).view(-1, 3, H, K).unbind(1)
        q, attended = q[len(slots) - len(h) :], torch.zeros(len(h), H, K, dtype=torch.double)
        for t in range(len(h)):
            last = len(slots) - len(h) + t
            first = last + 1 - self.config["mem_len"] if self.config["same_length"] else 0
            distances = torch.arange(last - first, -1, -1.0, dtype=torch.double)
            if self.config["clamp_len"] > 0:
                distances = distances.clamp(max=self.config["clamp_len"])
            angles = distances[:, None] / 10000 ** (torch.arange(0, D, 2, dtype=torch.double) / D)
            r = (torch.cat([angles.sin(), angles.cos()], dim=1) @ w["dec_attn.r_net.weight"].T).view(-1, H, K)
            content = ((q[t] + w["dec_attn.r_w_bias"]) * k[first : last + 1]).sum(-1)
            position = ((q[t] + w["dec_attn.r_r_bias"]) * r).sum(-1)
            weights = ((content + position) / math.sqrt(K)).softmax(dim=0)
            attended[t] = (weights[..., None] * v[first : last + 1]).sum(0)
        h = self.norm(w, "dec_attn", h + attended.flatten(1) @ w["dec_attn.o_net.weight"].T)
        hidden = (h @ w["pos_ff.CoreNet.0.weight"].T + w["pos_ff.CoreNet.0.bias"]).relu()
        return self.norm(w, "pos_ff", h + hidden @ w["pos_ff.CoreNet.3.weight"].T + w["pos_ff.CoreNet.3.bias"])

    def norm(self, w: dict[str, Tensor], branch: str, x: Tensor) -> Tensor:
        weight, bias = w[f"{branch}.layer_norm.weight"], w[f"{branch}.layer_norm.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, 1e-5)

    def log_p(self, h: Tensor) -> Tensor:
        def scores(band: int) -> Tensor:
            projected = h @ self.weights[f"crit.out_projs.{band}"] if self.config["cutoffs"] else h
            weight, bias = self.weights[f"crit.out_layers.{band}.weight"], self.weights[f"crit.out_layers.{band}.bias"]
            if band == 0 and self.config["cutoffs"]:
                weight = torch.cat([weight, self.weights["crit.cluster_weight"]])
                bias = torch.cat([bias, self.weights["crit.cluster_bias"]])
            return (weight @ projected + bias).log_softmax(dim=0)

        head, first = scores(0), self.edges[1]
        clusters = range(1, len(self.edges) - 1)
        return torch.cat([head[:first], *(head[first + i - 1] + scores(i) for i in clusters)])


def folder(path: Path, config: dict[str, Any], weights: dict[str, Tensor], words: list[str] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    (path / "vocab.txt").write_text("\n".join(WORDS if words is None else words) + "\n")
    return path


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"untie_r": False, "clamp_len": -1},
        {"cutoffs": [], "div_val": 1, "clamp_len": 4, "mem_len": 3},
    ],
    ids=["as published", "shared biases, no clamp", "plain softmax, short memory"],
)
def test_losses_are_those_of_the_published_definition(tmp_path, changed):
    config = CONFIG | changed
    weights = tensors(config)
    made = transfo_xl.convert(folder(tmp_path / "published", config, weights), tmp_path / "release")
    assert made.notes == []
    loaded = compressive.load(made.folder, device="cpu")
    model, reference = loaded.model.double(), Reference(config, weights)
    tokens = torch.randint(config["vocab_size"], (43,), generator=torch.Generator().manual_seed(1))
    memory, T = model.initial_memory(1), config["tgt_len"]
    for start in range(0, 42, T):  # seven windows: memory fills and overflows
        inputs, targets = tokens[start : start + T], tokens[start + 1 : start + 1 + T]
        expected = reference.read(inputs.tolist())
        out = model(inputs[None], memory, targets=targets[None])
        torch.testing.assert_close(out.nll[0], -expected[torch.arange(T), targets])
        torch.testing.assert_close(model(inputs[None], memory).logits[0].log_softmax(-1), expected)
        memory = out.memory
    logits, _ = prime(model, tokens[:42])  # as generation reads it, step by step where a window is not whole
    torch.testing.assert_close(logits[0].log_softmax(-1), expected[-1])


def test_tokens_that_see_equally_much_are_exact_in_windows_of_one(tmp_path):
    config = CONFIG | {"same_length": True}
    weights = tensors(config)
    made = transfo_xl.convert(folder(tmp_path / "published", config, weights), tmp_path / "release", window=1)
    assert made.notes == []
    model, reference = compressive.load(made.folder, device="cpu").model.double(), Reference(config, weights)
    tokens = torch.randint(config["vocab_size"], (25,), generator=torch.Generator().manual_seed(1))
    expected = torch.cat([reference.read(tokens[start : start + 6].tolist()) for start in range(0, 24, 6)])
    nll = torch.from_numpy(score(model, tokens.numpy()))
    torch.testing.assert_close(nll[1:], -expected[torch.arange(24), tokens[1:]])


def test_weights_saved_by_torch_give_the_same_release(tmp_path):
    weights = tensors(CONFIG)
    source = folder(tmp_path / "published", CONFIG, weights)
    transfo_xl.convert(source, tmp_path / "first")
    (source / "model.safetensors").unlink()
    (source / "vocab.txt").unlink()
    torch.save(weights, source / "pytorch_model.bin")
    vocabulary = {"idx2sym": WORDS, "sym2idx": {w: i for i, w in enumerate(WORDS)}, "counter": Counter({"the": 7})}
    torch.save(vocabulary, source / "vocab.bin")
    transfo_xl.convert(source, tmp_path / "second")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    tokenizer = Run.open(tmp_path / "second").tokenizer()
    assert isinstance(tokenizer, WordTokenizer)
    assert [word.decode() for word in tokenizer.words] == WORDS
    assert tokenizer.counts.tolist()[:3] == [0, 7, 0]


def test_tied_tensors_may_be_left_out(tmp_path):
    weights = tensors(CONFIG)
    fewer = {
        name: x
        for name, x in weights.items()
        if not name.startswith(("crit.out_layers", "crit.out_projs")) or name.endswith(("bias", "projs.0"))
    }
    assert len(fewer) == len(weights) - 7
    transfo_xl.convert(folder(tmp_path / "published", CONFIG, fewer), tmp_path / "release")
    assert compressive.load(tmp_path / "release", device="cpu").model.config.first_band_projections


@pytest.mark.slow
def test_the_commands_take_the_release(tmp_path):
    source = folder(tmp_path / "published", CONFIG | {"same_length": True}, tensors(CONFIG))
    release = tmp_path / "release"
    made = command("convert", str(source), "--out", str(release), "--window", "4", "--corpus", "tiny")
    assert made.returncode == 0
    assert "every token sees 11 positions" in made.stderr
    assert "12 to 15" in made.stderr
    said = command("generate", release, "--prompt", "the word3", "--length", "8", "--device", "cpu")
    assert (said.returncode, len(said.stdout.split()) > 1) == (0, True)

    text = [b"the word1 word2\nword3 unheard\n"] * 9
    splits = dict.fromkeys(("train", "valid", "test"), text)
    tokenizer = Run.open(release).tokenizer()
    write_corpus(tmp_path / "data" / "tiny", "tiny", tokenizer, splits, {})
    scored = command("evaluate", release, "--data-dir", tmp_path / "data", "--json", "--device", "cpu")
    found = json.loads(scored.stdout)
    loaded = compressive.load(release, device="cpu")
    tokens = Corpus.open(tmp_path / "data" / "tiny").split("test")
    assert found["perplexity"] == pytest.approx(loaded.score(tokens.astype("int64")).perplexity, rel=1e-5)
    assert found["memory_size"] == 11
    write_corpus(tmp_path / "other" / "tiny", "tiny", WordTokenizer.train(text), splits, {})
    refused = command("evaluate", release, "--data-dir", tmp_path / "other", "--device", "cpu")
    assert (refused.returncode, f"--vocabulary {release}" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"attn_type": 1}, "attn_type=1"),
        ({"pre_lnorm": True}, "pre_lnorm=True"),
        ({"d_embed": 8}, "d_embed=8"),
        ({"d_head": 4}, "d_head=4"),
        ({"div_val": 1}, "div_val=1"),
        ({"sample_softmax": 5}, "sample_softmax=5"),
        ({"layer_norm_epsilon": 1e-12}, "layer_norm_epsilon=1e-12"),
        ({"n_layer": 4}, r"no tensor transformer\.layers\.3\.dec_attn"),
        ({"n_layer": 2}, r"unknown tensors transformer\.layers\.2"),
        ({"d_inner": 30}, r"CoreNet\.0\.weight of shape \(24, 16\): the configuration asks for \(30, 16\)"),
    ],
)
def test_what_cannot_be_represented_is_named(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        transfo_xl.convert(folder(tmp_path / "published", CONFIG | changed, tensors(CONFIG)), tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_untied_weights_and_other_vocabularies_are_refused(tmp_path):
    weights = tensors(CONFIG)
    untied = weights | {"crit.out_projs.2": weights["crit.out_projs.2"] + 1}
    with pytest.raises(ValueError, match=r"crit\.out_projs\.2 differs from transformer\.word_emb\.emb_projs\.2"):
        transfo_xl.convert(folder(tmp_path / "untied", CONFIG, untied), tmp_path / "release")
    for name, words, message in (
        ("short", WORDS[:-1], "39 words: config.json says vocab_size=40"),
        ("empty", [*WORDS[:5], "", *WORDS[6:]], "line 6 is empty"),
        ("lm1b", ["<S>", "<UNK>", *WORDS[:1], *WORDS[3:]], "has no <unk>"),
    ):
        with pytest.raises(ValueError, match=message):
            transfo_xl.convert(folder(tmp_path / name, CONFIG, weights, words), tmp_path / "release")


class Harmful:
    """A pickle that would create a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_run_no_code(tmp_path):
    source, harm = folder(tmp_path / "published", CONFIG, tensors(CONFIG)), tmp_path / "harm"
    (source / "vocab.txt").unlink()
    (source / "vocab.pkl").write_bytes(pickle.dumps(Harmful(harm)))
    with pytest.raises(ValueError, match=r"is a pickle, which may hold code and is not read: .*vocab\.txt"):
        transfo_xl.convert(source, tmp_path / "release")
    torch.save(Harmful(harm), source / "vocab.bin")
    with pytest.raises(ValueError, match=r"vocab\.bin cannot be read without running code"):
        transfo_xl.convert(source, tmp_path / "release")
    (source / "model.safetensors").unlink()
    torch.save(Harmful(harm), source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read .*expected tensors and nothing else"):
        transfo_xl.convert(source, tmp_path / "release")
    assert not harm.exists()
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match="has no weights"):
        transfo_xl.convert(source, tmp_path / "release")
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        transfo_xl.convert(tmp_path / "nowhere", tmp_path / "release")
    (tmp_path / "release").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        transfo_xl.convert(source, tmp_path / "release")


def test_the_vocabulary_keeps_its_order(tmp_path):
    transfo_xl.convert(folder(tmp_path / "published", CONFIG, tensors(CONFIG)), tmp_path / "release")
    tokenizer = load_tokenizer(tmp_path / "release")
    assert tokenizer.encode(b"the word0\n\nunheard word36").tolist() == [1, 3, 0, 0, 2, 39, 0]
