"""A release from a TransformerXL in Hugging Face's layout, which `transfo-xl-wt103` was published in.

config.json                               its configuration
model.safetensors, or pytorch_model.bin   its weights; the latter is read without running code that it may hold
vocab.txt, or vocab.bin                   its words, one per line in the order of their ids, or as torch saved them

What cannot be represented is refused by name, see `_refuse`. What differs is returned as notes.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from compressive.config import DataConfig, ModelConfig, RunConfig
from compressive.data.download import sha256_of
from compressive.data.tokenizer import FILE, WordTokenizer
from compressive.model.language_model import CompressiveLM
from compressive.runs.export import new_release, require_new, write_release
from compressive.runs.run import CORPUS

DEFAULTS: dict[str, Any] = {
    "vocab_size": 267_735, "cutoffs": [20_000, 40_000, 200_000], "d_model": 1024, "d_embed": 1024, "n_head": 16,
    "d_head": 64, "d_inner": 4096, "div_val": 4, "pre_lnorm": False, "n_layer": 18, "mem_len": 1600,
    "clamp_len": 1000, "same_length": True, "attn_type": 0, "sample_softmax": -1, "dropout": 0.1, "dropatt": 0.0,
    "untie_r": True, "layer_norm_epsilon": 1e-5, "tgt_len": 128,
}  # fmt: skip
"""What a config.json that lacks a value means: transfo-xl-wt103's."""
PICKLE = "python -c \"import pickle; print(*pickle.load(open('vocab.pkl', 'rb'))['idx2sym'], sep='\\n')\" > vocab.txt"
"""Makes vocab.txt of vocab.pkl; a pickle runs whatever code it holds, so this is not done here."""


class Converted(NamedTuple):
    """A new release, and how its model differs from the original."""

    folder: Path
    notes: list[str]


def convert(source: Path, out: Path, *, window: int | None = None, corpus: str = "wikitext103") -> Converted:
    """Write the TransformerXL in the folder `source` as a release into the new folder `out`, atomically.

    `window` is how many tokens are read at once, by default the tgt_len of config.json; `corpus` names the corpus that
    `compressive evaluate` looks for. Raises FileNotFoundError or ValueError for what is missing, damaged or cannot be
    represented, OSError if `out` cannot be written.
    """
    require_new(out)
    theirs = _read_config(source / "config.json")
    _refuse(theirs)
    config = _model_config(theirs, window)
    weights = _weights(_read_tensors(source), theirs, config)
    tokenizer = _read_vocabulary(source, config.vocab_size)
    with new_release(out) as partial:
        about = {"corpus": corpus, "step": 0, "checkpoint": f"converted from {source.name}"}
        write_release(partial, RunConfig(config, DataConfig(corpus)), weights, tokenizer, about)
        kept = {"name": corpus, "fingerprint": None, "tokenizer": tokenizer.kind}
        kept["tokenizer_sha256"] = _tokenizer_sha256(tokenizer)
        (partial / CORPUS).write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    notes = []
    if theirs["same_length"] and config.window > 1:
        memory = theirs["mem_len"]
        notes.append(
            f"same_length: in the original every token sees {memory:,} positions, its own included; here it sees all "
            f"of memory and its window so far, {memory + 1:,} to {memory + config.window:,}; --window 1 is as the "
            "original, and slow"
        )
    return Converted(out, notes)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: expected the folder of a TransformerXL, such as transfo-xl-wt103"
        )
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): download it again") from None
    kind = found.get("model_type", "transfo-xl") if isinstance(found, dict) else None
    if kind != "transfo-xl":
        raise ValueError(f"{path}: model_type={kind!r}: expected transfo-xl; other models cannot be converted")
    return {**DEFAULTS, **found}


def _refuse(theirs: dict[str, Any]) -> None:
    """Raise ValueError, naming it, for what our model cannot represent."""

    def refuse(name: str, expected: str) -> None:
        raise ValueError(f"{name}={theirs[name]!r}: expected {expected}; this model cannot be converted")

    if theirs["attn_type"] != 0:
        refuse("attn_type", "0, relative positions")
    if theirs["pre_lnorm"]:
        refuse("pre_lnorm", "false: with norms before the branches our model has one more at its end")
    if theirs["d_embed"] != theirs["d_model"]:
        refuse("d_embed", f"d_model={theirs['d_model']}")
    if theirs["n_head"] * theirs["d_head"] != theirs["d_model"]:
        refuse("d_head", f"d_model / n_head = {theirs['d_model']} / {theirs['n_head']}")
    if theirs["cutoffs"] and theirs["div_val"] == 1:
        refuse("div_val", f"2 or more with cutoffs={theirs['cutoffs']}, as our bands have tables of falling width")
    if theirs["sample_softmax"] > 0:
        refuse("sample_softmax", "-1, no sampled softmax")
    if theirs["layer_norm_epsilon"] != 1e-5:
        refuse("layer_norm_epsilon", "1e-5")


def _model_config(theirs: dict[str, Any], window: int | None) -> ModelConfig:
    cutoffs = tuple(theirs["cutoffs"])
    window = theirs["tgt_len"] if window is None else window
    # Of windows of one token each sees memory and itself: one slot less makes that as many as with same_length.
    memory_size = max(0, theirs["mem_len"] - 1) if theirs["same_length"] and window == 1 else theirs["mem_len"]
    return ModelConfig(
        vocab_size=theirs["vocab_size"],
        n_layers=theirs["n_layer"],
        d_model=theirs["d_model"],
        n_heads=theirs["n_head"],
        d_ff=theirs["d_inner"],
        dropout=theirs["dropout"],
        attention_dropout=theirs["dropatt"],
        window=window,
        memory_size=memory_size,
        compressed_size=0,
        empty_memory="zeros",
        norm="post",
        adaptive_cutoffs=cutoffs,
        adaptive_factor=theirs["div_val"] if cutoffs else ModelConfig.adaptive_factor,
        first_band_projections=bool(cutoffs),
        max_distance=max(0, theirs["clamp_len"]),
    )


def _read_tensors(source: Path) -> dict[str, Tensor]:
    safe, pickled = source / "model.safetensors", source / "pytorch_model.bin"
    try:
        if safe.is_file():
            return load_file(safe)
        if pickled.is_file():
            found: dict[str, Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
            return found
    except Exception as error:  # pickle, zipfile and torch raise errors of many kinds
        path, reason = (safe if safe.is_file() else pickled), str(error).splitlines()[0]
        kind = "tensors in safetensors' format" if isinstance(error, SafetensorError) else "tensors and nothing else"
        raise ValueError(f"{path} cannot be read ({reason}): expected {kind}; download it again") from error
    raise FileNotFoundError(f"{source} has no weights: expected model.safetensors or pytorch_model.bin")


def _weights(found: dict[str, Tensor], theirs: dict[str, Any], config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict of our model; raise ValueError for tensors that are missing, unknown or of other shapes."""
    remaining = {name: x for name, x in found.items() if not name.endswith("pos_emb.inv_freq")}
    names = dict(_names(config, theirs["untie_r"]))
    weights: dict[str, Tensor] = {}
    with torch.device("meta"):
        wanted = CompressiveLM(config).state_dict()
    for ours, (name, part) in names.items():
        if name not in found:
            raise ValueError(f"no tensor {name}: expected a TransformerXL with its output layer, TransfoXLLMHeadModel")
        remaining.pop(name, None)
        tensor = found[name] if part is None else found[name][part]
        if tensor.shape != wanted[ours].shape:
            raise ValueError(
                f"{name} of shape {tuple(found[name].shape)}: the configuration asks for {tuple(wanted[ours].shape)}"
                + ("" if part is None else f" as rows {part.start or 0} to {part.stop or len(found[name])}")
            )
        weights[ours] = tensor.float().clone(memory_format=torch.contiguous_format)
    for name, tied in _tied(config):
        if (other := remaining.pop(name, None)) is not None and not torch.equal(other, found[tied]):
            raise ValueError(f"{name} differs from {tied}: expected tied weights; this model cannot be converted")
    if remaining:
        raise ValueError(
            f"unknown tensors {', '.join(sorted(remaining)[:5])}: expected those of a TransfoXLLMHeadModel"
        )
    return weights


def _names(config: ModelConfig, untie_r: bool) -> Iterator[tuple[str, tuple[str, slice | None]]]:
    """Our name, their name, and which rows of their tensor it is."""
    D, embedding, crit = config.d_model, "transformer.word_emb", "crit"
    if config.adaptive_cutoffs:
        for i in range(len(config.adaptive_cutoffs) + 1):
            yield f"embedding.tables.{i}", (f"{embedding}.emb_layers.{i}.weight", None)
            yield f"embedding.biases.{i}", (f"{crit}.out_layers.{i}.bias", None)
            if i > 0:
                yield f"embedding.projections.{i - 1}", (f"{embedding}.emb_projs.{i}", None)
        yield "embedding.first_input", (f"{embedding}.emb_projs.0", None)
        yield "embedding.first_output", (f"{crit}.out_projs.0", None)
        yield "embedding.band_scores.weight", (f"{crit}.cluster_weight", None)
        yield "embedding.band_scores.bias", (f"{crit}.cluster_bias", None)
    else:
        yield "embedding.table", (f"{embedding}.emb_layers.0.weight", None)
        yield "embedding.bias", (f"{crit}.out_layers.0.bias", None)
    for i in range(config.n_layers):
        ours, attention, mlp = (
            f"trunk.layers.{i}", f"transformer.layers.{i}.dec_attn", f"transformer.layers.{i}.pos_ff",
        )  # fmt: skip
        biases = attention if untie_r else "transformer"
        yield f"{ours}.attention.query.weight", (f"{attention}.qkv_net.weight", slice(None, D))
        yield f"{ours}.attention.key_value.weight", (f"{attention}.qkv_net.weight", slice(D, None))
        yield f"{ours}.attention.output.weight", (f"{attention}.o_net.weight", None)
        yield f"{ours}.attention.relative.weight", (f"{attention}.r_net.weight", None)
        yield f"{ours}.attention.content_bias", (f"{biases}.r_w_bias", None)
        yield f"{ours}.attention.position_bias", (f"{biases}.r_r_bias", None)
        for kind in ("weight", "bias"):
            yield f"{ours}.attention_norm.{kind}", (f"{attention}.layer_norm.{kind}", None)
            yield f"{ours}.mlp.0.{kind}", (f"{mlp}.CoreNet.0.{kind}", None)
            yield f"{ours}.mlp.3.{kind}", (f"{mlp}.CoreNet.3.{kind}", None)
            yield f"{ours}.mlp_norm.{kind}", (f"{mlp}.layer_norm.{kind}", None)


def _tied(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Tensors of theirs that must equal others, if they are there: weights of the output, shared biases."""
    for i in range(len(config.adaptive_cutoffs) + 1):
        yield f"crit.out_layers.{i}.weight", f"transformer.word_emb.emb_layers.{i}.weight"
        if i > 0:
            yield f"crit.out_projs.{i}", f"transformer.word_emb.emb_projs.{i}"
    for i in range(config.n_layers):  # only where `untie_r` is false are these not read already
        for bias in ("r_w_bias", "r_r_bias"):
            yield f"transformer.layers.{i}.dec_attn.{bias}", f"transformer.{bias}"


def _read_vocabulary(source: Path, size: int) -> WordTokenizer:
    text, saved = source / "vocab.txt", source / "vocab.bin"
    if text.is_file():
        lines = text.read_text("utf-8").removesuffix("\n").split("\n")
        fields = [line.split() for line in lines]
        if not all(fields):
            raise ValueError(f"{text}: line {fields.index([]) + 1} is empty: expected one word per line")
        path, words, counts = text, [field[0] for field in fields], {}
    elif saved.is_file():
        try:
            found = torch.load(saved, weights_only=True)
            path, words, counts = saved, list(found["idx2sym"]), dict(found.get("counter") or {})
        except Exception as error:
            raise ValueError(f"{saved} cannot be read without running code that it may hold: {_make_text()}") from error
    elif (source / "vocab.pkl").is_file():
        raise ValueError(f"{source / 'vocab.pkl'} is a pickle, which may hold code and is not read: {_make_text()}")
    else:
        raise FileNotFoundError(
            f"{source} has no vocabulary: expected vocab.txt, one word per line in the order of ids"
        )
    if len(words) != size:
        raise ValueError(f"{path} has {len(words):,} words: config.json says vocab_size={size:,}")
    return WordTokenizer([word.encode() for word in words], [int(counts.get(word, 0)) for word in words])


def _make_text() -> str:
    return f"where you trust it, make vocab.txt of it, one word per line in the order of ids: {PICKLE}"


def _tokenizer_sha256(tokenizer: WordTokenizer) -> str:
    """The checksum that a corpus of this vocabulary has."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return sha256_of(Path(folder) / FILE)
